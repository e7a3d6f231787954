"""Ring attention by hand: a long sequence is split over devices, and keys and values go around.

Every device keeps its queries. In W - 1 steps it receives the keys and values of all others from
its neighbour, computes the attention to each block, and merges the results by an online softmax
(Liu et al. 2023, https://arxiv.org/abs/2310.01889). Sending overlaps with computing.

A sequence is cut into chunks, and a layout says which chunks a device holds. A causal mask removes
every pair of a query chunk with a later key chunk, so the layout determines each device's work.
Shapes: H heads, n tokens per device, E features per head; a batch dimension may precede H.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.group import Group, new_like, wait_all
from titanlite.tools.lab.mesh import Axes

LAYOUTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "none": lambda rank, world_size: (rank,),
    "headtail": lambda rank, world_size: (rank, 2 * world_size - 1 - rank),
}
"""Per layout: (rank, world size) -> the numbers of the chunks that the rank holds, in order."""


def shard_sequence(tensor: torch.Tensor, world_size: int, layout: str) -> list[torch.Tensor]:
    """The tokens of each rank. `tensor` is (..., tokens, features).

    Raises ValueError for an unknown layout, or if the tokens do not divide into its chunks.
    """
    held = [_chunks(layout, rank, world_size) for rank in range(world_size)]
    num_chunks = world_size * len(held[0])
    if tensor.size(-2) % num_chunks:
        raise ValueError(
            f"{tensor.size(-2)} tokens cannot be split into the {num_chunks} equal chunks of the "
            f"{layout} layout on {world_size} ranks"
        )
    parts = tensor.chunk(num_chunks, -2)
    return [torch.cat([parts[chunk] for chunk in chunks], -2) for chunks in held]


def unshard_sequence(shards: Sequence[torch.Tensor], layout: str) -> torch.Tensor:
    """The whole sequence from the shards of all ranks, in rank order: undoes shard_sequence."""
    parts: dict[int, torch.Tensor] = {}
    for rank, shard in enumerate(shards):
        chunks = _chunks(layout, rank, len(shards))
        parts.update(zip(chunks, shard.chunk(len(chunks), -2), strict=True))
    return torch.cat([parts[chunk] for chunk in sorted(parts)], -2)


def ring_attention(
    device: VirtualDevice,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "headtail",
    causal: bool = True,
    axes: Axes = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(E)) v over the sequence that is split over `axes` (None: all devices).

    q, k, v and the result are this device's shards (..., H, n, E) in this layout. All devices of
    the group must call it, and run backward on the result if one does.
    """
    result: torch.Tensor = RingAttention.apply(q, k, v, device, axes, layout, causal)
    return result


class RingAttention(torch.autograd.Function):
    """The attention of one device's queries to the keys and values of its whole group."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        device: VirtualDevice,
        axes: Axes,
        layout: str,
        causal: bool,
    ) -> torch.Tensor:
        group = device.group(axes)
        out = torch.zeros_like(q)
        lse = q.new_full((*q.shape[:-1], 1), -math.inf)
        qs, outs, lses = (by_chunk(tensor, layout, group) for tensor in (q, out, lse))
        for _, owner, keys, values in circulate(device, axes, torch.stack([k, v])):
            ks, vs = by_chunk(keys, layout, group), by_chunk(values, layout, group)
            pairs = visible(group, owner, layout, causal)
            with work(f"q k{owner}", pairs):
                for i, j, on_diagonal in pairs:
                    merge(outs[i], lses[i], *attend(qs[i], ks[j], vs[j], on_diagonal))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.device, ctx.axes, ctx.layout, ctx.causal = device, axes, layout, causal
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Keys and values go around again, and their gradients one step behind them.

        With the final log-sum-exp, exp(scores - lse) are the weights of the whole softmax. So the
        gradients of all blocks add up, and out and lse are all that the forward pass has to save.
        """
        q, k, v, out, lse = ctx.saved_tensors
        (dout,) = gradients
        device, axes = ctx.device, ctx.axes
        group = device.group(axes)
        delta = (dout * out).sum(-1, keepdim=True)
        dq, own = torch.zeros_like(q), torch.empty(0)
        dqs, *rows = (by_chunk(one, ctx.layout, group) for one in (dq, q, dout, lse, delta))
        sums: Shift | None = None
        for step, owner, keys, values in circulate(device, axes, torch.stack([k, v])):
            dkv = torch.zeros((2, *k.shape), dtype=k.dtype, device=k.device)
            ks, vs, dks, dvs = (by_chunk(one, ctx.layout, group) for one in (keys, values, *dkv))
            pairs = visible(group, owner, ctx.layout, ctx.causal)
            with work(f"dq dk{owner}", pairs):
                for i, j, on_diagonal in pairs:
                    of_chunk = [one[i] for one in rows]
                    blocks = attend_backward(of_chunk, [ks[j], vs[j]], on_diagonal)
                    for total, block in zip((dqs[i], dks[j], dvs[j]), blocks, strict=True):
                        total.add_(block)
            if step == 0:
                own = dkv
                continue
            # The gradients of others' keys: add to those of the devices before, and send them on.
            # After the last step the next device is their owner.
            partial = dkv if sums is None else dkv + sums.wait()
            sums = Shift(device, axes, partial, "dk, dv")
        if sums is not None:
            own += sums.wait()
        return dq, own[0], own[1], None, None, None, None


class Shift:
    """A tensor on its way to the next device of the ring, while one arrives from the previous."""

    def __init__(self, device: VirtualDevice, axes: Axes, tensor: torch.Tensor, label: str) -> None:
        self._received = new_like(tensor)
        with device.collective("shift", axes, label, tensor) as (group, _):
            self._transfers = [
                group.isend(tensor, group.rank + 1),
                group.irecv(self._received, group.rank - 1),
            ]

    def wait(self) -> torch.Tensor:
        wait_all(self._transfers)
        return self._received


def circulate(
    device: VirtualDevice, axes: Axes, kv: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Step, owner, keys and values: this device's own, then those of the devices before it.

    The next ones are on their way while the caller computes.
    """
    group = device.group(axes)
    for step in range(group.size):
        shift = Shift(device, axes, kv, "k, v") if step < group.size - 1 else None
        yield step, (group.rank - step) % group.size, kv[0], kv[1]
        if shift is not None:
            kv = shift.wait()


def by_chunk(tensor: torch.Tensor, layout: str, group: Group) -> tuple[torch.Tensor, ...]:
    """Views of the chunks of a shard."""
    return tensor.chunk(len(_chunks(layout, group.rank, group.size)), -2)


def visible(group: Group, owner: int, layout: str, causal: bool) -> list[tuple[int, int, bool]]:
    """The pairs of a query chunk here and a key chunk of `owner` that are not masked.

    A chunk is given by its place in the shard. The last value is whether the two are the same chunk
    under a causal mask, which leaves a triangle of it.
    """
    return [
        (i, j, causal and key_chunk == query_chunk)
        for i, query_chunk in enumerate(_chunks(layout, group.rank, group.size))
        for j, key_chunk in enumerate(_chunks(layout, owner, group.size))
        if not causal or key_chunk <= query_chunk
    ]


def work(name: str, pairs: Sequence[Any]) -> AbstractContextManager[Any]:
    """Name the work inside for the record of the run; if there is none, it is not recorded."""
    return record_function(name) if pairs else nullcontext()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, on_diagonal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention to one block of keys, and the logarithm of the softmax's denominator."""
    scores = _scores(q, k, on_diagonal)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def attend_backward(
    rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor], on_diagonal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contributions of one block to dq, dk and dv.

    `rows` are q, dout, lse and delta, the row sum of dout * out; `columns` are k and v.
    """
    q, dout, lse, delta = rows
    k, v = columns
    weights = (_scores(q, k, on_diagonal) - lse).exp()
    dscores = weights * (dout @ v.mT - delta) / math.sqrt(q.size(-1))
    return dscores @ k, dscores.mT @ q, weights.mT @ dout


def merge(
    out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor
) -> None:
    """Add a block to `out` and `lse`, in place: each is weighted by its share of the denominator.

    exp(lse) is a softmax's denominator, so the common one is the sum, and its logarithm logaddexp.
    An `lse` of -inf means that nothing has been added yet.
    """
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp()).add_(block_out * (block_lse - total).exp())
    lse.copy_(total)


def _scores(q: torch.Tensor, k: torch.Tensor, on_diagonal: bool) -> torch.Tensor:
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if on_diagonal:
        later = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _chunks(layout: str, rank: int, world_size: int) -> tuple[int, ...]:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    return LAYOUTS[layout](rank, world_size)
