"""Ring attention: exact attention over a sequence that is sharded over ranks.

Each rank keeps its queries and receives the keys and values of all ranks block by block (pass-KV).
The partial results of the blocks are merged by their log-sum-exp. Ring attention is one custom
operator with its own backward pass: autograd saves only q, k, v, out and lse, the compiler sees one
opaque call, and selective activation checkpointing can save it by name:
`torch.ops.titanlite.ring_attention.default`.

With several documents in a sequence, a query attends only to its own document. The numbers of all
ranks' documents are noted on a batch (modules/attention/documents.py), or all-gathered and read
once. By their ranges a rank leaves out rectangles without a visible pair. A part that also has
pairs of different documents gets a mask, or on GPUs a kernel for sequences one after another.

Sources: Ring Attention (arXiv 2310.01889), pass-KV (arXiv 2411.01783).
Shapes: B batch, H query heads, K key/value heads, T local tokens, E head size; kv [2, B, S, K, E].
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils.flop_counter import register_flop_formula

from titanlite.errors import ConfigError
from titanlite.modules.attention.dense import attend
from titanlite.modules.attention.documents import Documents, note, noted, on_host, same_document
from titanlite.modules.attention.kernels import (
    KERNELS,
    Kernel,
    Scoring,
    accumulator_dtype,
    choose_kernel,
)
from titanlite.modules.attention.layout import Layout, Tile, make_layout
from titanlite.parallelize.context_parallel.rotation import Rotation, find_rotation, gather_whole


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    causal: bool = True,
    layout: str | Layout = "headtail",
    rotate_method: str = "alltoall",
    scale: float | None = None,
    documents: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    q is [B, H, T, E], k and v are [B, K, T, E] with H a multiple of K; the result is [B, H, T, E].
    All four are shards, as `layout.shard` makes them. Every rank of the one-dimensional `mesh` must
    call this with the same shapes and settings; with one rank it is plain attention. `scale` is by
    default 1 / sqrt(E). `documents` [B, T], also a shard, has the index of each token's document
    within its sequence; a query then attends only to keys of its own document; with a `window`,
    which is causal, only to the last `window` keys up to its own. `softcap` replaces a score s by
    softcap x tanh(s / softcap). `sinks` [H] are scores of a key without a value that every query
    attends to; the ranks' gradients of it add up.

    Raises ConfigError for an unknown layout or rotate method, a layout for another number of ranks,
    and an odd number of local tokens if the layout needs two chunks per rank; ValueError for shapes
    that do not match.
    """
    ring = RingAttention(mesh, layout, rotate_method)
    keys: Any = {"window": window, "softcap": softcap, "sinks": sinks}
    return ring(q, k, v, causal, scale, documents=documents, **keys)


class RingAttention(nn.Module):
    """`ring_attention` as a module, to replace the inner attention of a model.

    The constructor checks the settings and looks up the process group; `forward` can be compiled.
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup,
        layout: str | Layout = "headtail",
        rotate_method: str = "alltoall",
        *,
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        self.is_causal = is_causal
        if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
            raise ConfigError(
                f"mesh: ring attention needs one axis, but this mesh has {mesh.ndim}; "
                'select one, such as mesh["cp"]'
            )
        group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        if isinstance(layout, str):
            layout = make_layout(layout, group.size())
        if layout.num_ranks != group.size():
            raise ConfigError(
                f"layout: made for {layout.num_ranks} ranks, but the mesh has {group.size()}; "
                f"make it for {group.size()} ranks"
            )
        find_rotation(rotate_method)
        self.layout = layout
        self.rotate_method = rotate_method
        self.group_name = group.group_name

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool | None = None,
        scale: float | None = None,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool | None = None,
        enable_gqa: bool = False,
        documents: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`ring_attention` with the arguments of torch's scaled_dot_product_attention too.

        `is_causal` counts; if it is not given, `causal`, then the constructor's. With fewer heads
        of k and v than of q, attention is grouped-query, whatever `enable_gqa` is. Raises
        ConfigError for `attn_mask`, and for dropout.
        """
        if attn_mask is not None or dropout_p:
            what = "a mask" if attn_mask is not None else f"dropout of {dropout_p:g}"
            raise ConfigError(
                f"parallelism.context_parallel_degree: the attention module is called with {what}, "
                "but ring attention has neither masks nor dropout; call it without"
            )
        given = causal if is_causal is None else is_causal
        causal = self.is_causal if given is None else given
        num_values = v.size(-1)
        if v.dim() == 4 and num_values < q.size(-1):  # values of latent attention are shorter
            v = F.pad(v, (0, q.size(-1) - num_values))
        _check_shapes(q, k, v, documents)
        if self.layout.num_ranks == 1:
            keys: Any = {"window": window, "softcap": softcap, "sinks": sinks}
            out = attend(q, k, v, is_causal=causal, scale=scale, documents=documents, **keys)
            return out[..., :num_values]
        if q.size(2) % self.layout.chunks_per_rank:
            raise ConfigError(
                f"sequence length: {q.size(2)} tokens on a rank cannot be split into two equal "
                f"chunks for the {self.layout.name} layout; shard the sequence with layout.shard"
            )
        scale = q.size(3) ** -0.5 if scale is None else scale
        causal = causal or window is not None
        settings = (self.group_name, self.layout.name, self.rotate_method, causal, scale)
        more = (documents, window, softcap, sinks)
        out, *_ = torch.ops.titanlite.ring_attention(q, k, v, *settings, *more)
        return out[..., :num_values]

    def extra_repr(self) -> str:
        return (
            f"num_ranks={self.layout.num_ranks}, layout={self.layout.name}, "
            f"rotate_method={self.rotate_method}"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
    expected = (q.size(0), k.size(1), q.size(2), q.size(3)) if q.dim() == k.dim() == 4 else None
    if expected is None or k.shape != expected or v.shape != expected or q.size(1) % k.size(1):
        raise ValueError(
            "ring attention needs q [B, H, T, E] and k, v [B, K, T, E] with H a multiple of K, "
            f"not q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if documents is not None and documents.shape != (q.size(0), q.size(2)):
        raise ValueError(
            f"ring attention needs documents [B, T], here {[q.size(0), q.size(2)]}, "
            f"not {list(documents.shape)}"
        )


@torch.library.custom_op("titanlite::ring_attention", mutates_args=())
def _ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group_name: str,
    layout: str,
    rotate_method: str,
    causal: bool,
    scale: float,
    documents: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, T, E], lse [B, H, T] in the accumulator's dtype)."""
    rotation = _make_rotation(group_name, layout, rotate_method, causal)
    whole = _documents_of_all(documents, rotation)
    q = _with_unit_stride(q)
    dtype = accumulator_dtype(q.dtype)
    out = _empty_heads_inside(q, dtype).zero_()
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)

    def visit(key_rank: int, kv: Tensor) -> None:
        k, v = kv.transpose(2, 3)
        for tile, kernel, how in _parts(rotation, key_rank, q, whole, scale, window, softcap):
            rows, keys = ((tile.sequences, slice(None), s) for s in (tile.queries, tile.keys))
            found = kernel.forward(q[rows], k[keys], v[keys], how)
            merge(out[rows], lse[rows], *found)

    rotation.forward(_pack(k, v), visit)
    if sinks is not None:
        merge(out, lse, torch.zeros_like(out), sinks.to(dtype)[:, None].expand_as(lse))
    return out.to(q.dtype), lse


@torch.library.custom_op("titanlite::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group_name: str,
    layout: str,
    rotate_method: str,
    causal: bool,
    scale: float,
    documents: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of the sinks; that one is empty if there are none."""
    rotation = _make_rotation(group_name, layout, rotate_method, causal)
    whole = _documents_of_all(documents, rotation)
    q, grad_out = _with_unit_stride(q), _with_unit_stride(grad_out)
    dtype = accumulator_dtype(q.dtype)
    dq = _empty_heads_inside(q, dtype).zero_()

    def visit(key_rank: int, kv: Tensor) -> Tensor:
        k, v = kv.transpose(2, 3)
        dkv = torch.zeros_like(kv, dtype=dtype)
        dk, dv = dkv.transpose(2, 3)
        for tile, kernel, how in _parts(rotation, key_rank, q, whole, scale, window, softcap):
            rows, keys = ((tile.sequences, slice(None), s) for s in (tile.queries, tile.keys))
            tile_dq, tile_dk, tile_dv = kernel.backward(
                grad_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], how
            )
            dq[rows] += tile_dq
            dk[keys] += tile_dk
            dv[keys] += tile_dv
        return dkv

    dk, dv = rotation.backward(_pack(k, v), visit, dtype).transpose(2, 3)
    of_sinks = q.new_empty(0)
    if sinks is not None:
        # A sink takes exp(sink - lse) of a query's attention, and gives it nothing.
        shares = torch.exp(sinks.to(dtype)[:, None] - lse)
        of_sinks = -(shares * (grad_out.to(dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
    # Copy, because the outputs of a custom operator must not share memory, as dk and dv do here.
    copies = _empty_heads_inside(k).copy_(dk), _empty_heads_inside(v).copy_(dv)
    return dq.to(q.dtype), *copies, of_sinks


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the result for more keys into `out` [B, H, T, E] and `lse` [B, H, T], in place.

    Both are in the accumulator's dtype. The weight of the new block is its share of the softmax's
    denominator, exp(block_lse) / (exp(lse) + exp(block_lse)); this is a sigmoid, which cannot
    overflow. A row with no keys has lse = -inf and weight 0.
    Source: https://github.com/zhuzilin/ring-flash-attention/pull/34
    """
    share = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -torch.inf, 0)
    out.lerp_(block_out.to(out.dtype), share.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, block_lse))


def _make_rotation(group_name: str, layout: str, rotate_method: str, causal: bool) -> Rotation:
    group = _resolve_process_group(GroupName(group_name))
    return find_rotation(rotate_method)(group, make_layout(layout, group.size()), causal)


def _documents_of_all(documents: Tensor | None, rotation: Rotation) -> Documents | None:
    """What is known of all ranks' documents; gathered and read if it is not noted."""
    if documents is None:
        return None
    return noted(documents) or note(documents, on_host(gather_whole(documents, rotation.group)))


def _parts(
    rotation: Rotation,
    key_rank: int,
    q: Tensor,
    documents: Documents | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Iterator[tuple[Tile, Kernel, Scoring]]:
    """The tiles of this rank's queries and `key_rank`'s keys, and how to compute each.

    Rectangles without a pair of one document, or of one window, are left out. Nothing that is sent
    depends on this, so ranks may decide differently.
    """
    inputs = q.device, q.dtype, q.size(3)
    kernel, masked = choose_kernel(*inputs), choose_kernel(*inputs, masked=True)
    if softcap is not None:
        kernel = masked = KERNELS[-1]
    ranks, n, layout = (rotation.group.rank(), key_rank), q.size(2), rotation.layout
    tiles = layout.tiles(*ranks, n, rotation.causal)
    if window is not None and layout.chunks_per_rank == 2:
        tiles = [part for tile in tiles for part in tile.cut(n // 2)]
    if kernel.smallest_triangle is not None:
        tiles = [part for tile in tiles for part in tile.split(kernel.smallest_triangle)]
    for tile in tiles:
        parts, among = ([tile], None) if documents is None else documents.parts(*ranks, tile)
        if window is not None:
            parts = [near for part in parts for near in _near(layout, ranks, n, part, window)]
        for part in parts:
            rows = None if among is None or kernel.takes_masks else among.in_a_row(*ranks, part)
            if rows or (among is None and (part.reach is None or not kernel.takes_masks)):
                yield part, kernel, Scoring(part.causal, scale, None, softcap, part.reach, rows)
            else:
                mask = _mask(ranks, q, part, among)
                yield part, masked, Scoring(False, scale, mask, softcap)


def _near(layout: Layout, ranks: tuple[int, int], n: int, tile: Tile, window: int) -> list[Tile]:
    """The parts of a tile of evenly spaced positions that are in the window."""
    rows, keys = (layout.positions(rank, n * layout.num_ranks) for rank in ranks)
    step = int(rows[-1] - rows[-2]) if n > 1 else 1
    first = int(rows[tile.queries.start] - keys[tile.keys.start])
    return tile.within((window - 1 - first) // step)


def _mask(ranks: tuple[int, int], q: Tensor, tile: Tile, among: Documents | None) -> Tensor:
    """The mask of a tile."""
    rows, columns = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
    mask = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=q.device)
    mask = mask.tril() if tile.causal else mask
    mask = mask if tile.reach is None else mask.triu(-tile.reach)
    if among is not None:
        own, theirs = (among.whole[rank] for rank in ranks)
        mask = mask & same_document(own[:, tile.queries], theirs[:, tile.keys])
    return mask.expand(len(q[tile.sequences]), -1, -1, -1)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Pack two tensors [B, K, S, E] into one message [2, B, S, K, E]."""
    return torch.stack([k.transpose(1, 2), v.transpose(1, 2)])


def _with_unit_stride(tensor: Tensor) -> Tensor:
    """Make the last dimension contiguous: kernels require it, and some do not check it."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _empty_heads_inside(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, H, T, E] stored as [B, T, H, E], the memory order of the projections."""
    b, h, t, e = like.shape
    return like.new_empty((b, t, h, e), dtype=dtype).transpose(1, 2)


@_ring_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads_inside(q), q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))


@_ring_attention_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # The last of eleven; torch leaves out what is None at the end.
    sinks = saved[10] if len(saved) > 10 else None
    of_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return _empty_heads_inside(q), _empty_heads_inside(k), _empty_heads_inside(v), of_sinks


def _save(ctx, inputs, output) -> None:
    q, k, v, *ctx.settings, documents, window, softcap, sinks = inputs
    ctx.scoring = window, softcap
    ctx.save_for_backward(q, k, v, *output, documents, sinks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad_out: Tensor, *_) -> tuple[Tensor | None, ...]:
    *saved, documents, sinks = ctx.saved_tensors
    backward = torch.ops.titanlite.ring_attention_backward
    *grads, of_sinks = backward(grad_out, *saved, *ctx.settings, documents, *ctx.scoring, sinks)
    of_settings = (None,) * (len(ctx.settings) + 3)  # with the documents and ctx.scoring
    return (*grads, *of_settings, None if sinks is None else of_sinks)


@register_flop_formula(torch.ops.titanlite.ring_attention)
def _count_flops(q: torch.Size, k: torch.Size, v: torch.Size, group_name: str, *_, **__) -> int:
    """Count this rank's queries with all ranks' keys, masked or not, as PyTorch does."""
    num_keys = q[2] * _resolve_process_group(GroupName(group_name)).size()
    num_products = 2
    return num_products * 2 * math.prod(q) * num_keys


@register_flop_formula(torch.ops.titanlite.ring_attention_backward)
def _count_flops_backward(
    grad_out: torch.Size, q: torch.Size, k, v, out, lse, *settings, **_
) -> int:
    """Five products instead of two: the recomputed scores, and the gradients of four factors."""
    return _count_flops(q, k, v, *settings) * 5 // 2


_ring_attention.register_autograd(_differentiate, setup_context=_save)
