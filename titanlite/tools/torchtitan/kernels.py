"""Attention and grouped products without kernels: in full, for tensors on a CPU of any dtype.

The last functions are for tensors without values (plan.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Aux(NamedTuple):
    """What attention returns beside its output."""

    lse: Tensor


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, Any]:
    """What `torch.nn.attention.flex_attention` returns for `return_aux`, from every score.

    The functions of scores and masks are called with all indices at once.
    """
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
    places = [
        torch.arange(size).view([size if i == dim else 1 for i in range(4)])
        for dim, size in enumerate(scores.shape)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *places)
    mask = None if block_mask is None else block_mask.mask_mod(*places)
    return _attend(scores, mask, v)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    *_: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    return_aux: Any = None,
    **__: Any,
) -> Any:
    """What `torch.nn.attention.varlen.varlen_attn` returns, from every score."""
    (q_place, q_document), (k_place, k_document) = (
        (torch.arange(len(t)), torch.searchsorted(ends, torch.arange(len(t)), right=True))
        for t, ends in ((q, cu_seq_q), (k, cu_seq_k))
    )
    before, after = window_size
    # Queries and keys are of the same tokens, so their offsets in a document differ as these do.
    apart = k_place[None] - q_place[:, None]
    mask = q_document[:, None] == k_document[None]
    if before >= 0:
        mask &= apart >= -before
    if after >= 0:
        mask &= apart <= after
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.size(0) // t.size(0), 0) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
    out, aux = _attend(scores, mask, v)
    out = out.transpose(0, 1)
    return out if return_aux is None else (out, aux.lse)


def _attend(scores: Tensor, mask: Tensor | None, v: Tensor) -> tuple[Tensor, Any]:
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    return weights @ v, Aux(lse)


def grouped_product(a: Tensor, b: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """What `torch._grouped_mm` returns: rows of `a` up to each offset times a matrix of `b`."""
    ends = offs.tolist()
    parts = [
        a[start:end] @ matrix
        for start, end, matrix in zip([0, *ends], ends, b.unbind(), strict=False)
    ]
    return torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.size(-1))])


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any = None, window: int = 0, **_: Any
) -> tuple[Tensor, Aux]:
    """The shapes that a flash kernel returns and keeps, for heads before tokens."""
    width = v.size(-1)
    if block_mask is not None:
        window = _window_of(block_mask.mask_mod)
    if width < q.size(-1):
        # The operator has one width; the products of a narrower v are counted as of this one.
        v = torch.nn.functional.pad(v, (0, q.size(-1) - width))
    # tools/planner/operators.py reads the window here.
    out, lse = FLASH(q, k, v, float(window), True)
    return out[..., :width], Aux(lse)


def _window_of(mask_mod: Any) -> int:
    """The size of the window in a function of TorchTitan, or in those it joins; 0 without one."""
    kept = inspect.getclosurevars(mask_mod).nonlocals
    joined = [_window_of(one) for one in kept.get("mask_mods", ())]
    return int(kept.get("window_size", max(joined, default=0)))


def of_rows(seq_len: int, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kwargs: Any) -> Any:
    """The same as `varlen_attn` returns it, for rows of this length that are one document each."""
    rows = (t.unflatten(0, (-1, seq_len)).transpose(1, 2) for t in (q, k, v))
    out, aux = causal_attention(*rows, window=kwargs["window_size"][0] + 1)
    lse = aux.lse.transpose(0, 1).flatten(1)
    out = out.transpose(1, 2).flatten(0, 1)
    return out if kwargs.get("return_aux") is None else (out, lse)
