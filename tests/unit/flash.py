"""The flash kernels of a GPU on the CPU, in every dtype: their operators, from all scores.

What they give is that of PyTorch's flash_api.cpp and of flash_fwd_kernel.h: how windows are
clamped, that the last query and the last key are aligned, 0 and inf for a query without keys, and
what is in memory for tokens of no sequence.
"""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor

from titanlite.modules.attention import dense, documents
from titanlite.modules.attention.kernels import CpuFlash, CudaFlash, accumulator_dtype


def _sequences(q: Tensor, k: Tensor, bounds: tuple) -> Iterator[tuple]:
    """The index of the queries and of the keys of each sequence."""
    *starts, max_q, max_k = bounds
    if starts[0] is None:
        assert (max_q, max_k) == (q.size(1), k.size(1))
        yield from ((row, row) for row in range(len(q)))
        return
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in starts)
    assert all(x[0] == 0 and x.diff().min() > 0 for x in starts), "an empty sequence"
    assert [x.diff().max() for x in starts] == [max_q, max_k]
    of_queries, of_keys = ([slice(*ends) for ends in pairwise(x.tolist())] for x in starts)
    yield from zip(of_queries, of_keys, strict=True)


def _scores(q: Tensor, k: Tensor, bounds: tuple, is_causal: bool, scale, ends: tuple) -> Tensor:
    """The scores [H, T, S] of a sequence's q [T, H, E] and k [S, H, E]."""
    *_, max_k = bounds
    left, right = ends[0], 0 if is_causal else ends[1]
    left, right = (-1 if x is None or x >= max_k else x for x in (left, right))
    scores = torch.einsum("the,she->hts", q, k) * scale
    row = torch.arange(len(q))[:, None] + len(k) - len(q)
    column = torch.arange(len(k))
    if left >= 0 or right >= 0:
        left, right = (max_k if x < 0 else x for x in (left, right))
        is_out = (column > row + right) | (column < row - left)
        scores = scores.masked_fill(is_out, -torch.inf)
    return scores


def _wide(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.size(-2) // x.size(-2), -2).to(accumulator_dtype(x.dtype))


def forward(q, k, v, *settings, scale=None, window_size_left=None, window_size_right=None):
    *bounds, _, is_causal, _ = settings
    how = bounds, is_causal, scale or q.size(-1) ** -0.5, (window_size_left, window_size_right)
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out = torch.full_like(q, torch.nan)
    shape = (len(q), q.size(2), q.size(1)) if q.dim() == 4 else (q.size(1), len(q))
    lse = torch.full(shape, torch.nan, dtype=accumulator_dtype(q.dtype))
    for rows, keys in _sequences(q, k, bounds):
        scores = _scores(q[rows].to(lse.dtype), _wide(k, q)[keys], *how)
        found = scores.logsumexp(-1)
        weights = torch.exp(scores - found[..., None]).nan_to_num(0)
        out[rows] = torch.einsum("hts,she->the", weights, _wide(v, q)[keys]).to(q.dtype)
        place = rows if q.dim() == 4 else (slice(None), rows)
        lse[place] = found.masked_fill(found == -torch.inf, torch.inf)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, state[0].clone(), out.new_empty(0)


def backward(
    grad, q, k, v, out, lse, *settings, scale=None, window_size_left=None, window_size_right=None
):
    *bounds, _, is_causal, _, _ = settings
    scale = scale or q.size(-1) ** -0.5
    how = bounds, is_causal, scale, (window_size_left, window_size_right)
    assert lse.is_contiguous()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    for rows, keys in _sequences(q, k, bounds):
        own, of_out, of_grad = (x[rows].to(lse.dtype) for x in (q, out, grad))
        theirs, values = _wide(k, q)[keys], _wide(v, q)[keys]
        final = lse[rows] if q.dim() == 4 else lse[:, rows]
        weights = torch.exp(_scores(own, theirs, *how) - final[..., None])
        products = torch.einsum("the,she->hts", of_grad, values)
        of_scores = weights * (products - (of_grad * of_out).sum(-1).T[..., None]) * scale
        dq[rows] = torch.einsum("hts,she->the", of_scores, theirs).to(q.dtype)
        for of, left, right in ((dk, of_scores, own), (dv, weights, of_grad)):
            whole = torch.einsum("hts,the->she", left, right)
            of[keys] = whole.unflatten(1, (k.size(-2), -1)).sum(2).to(q.dtype)
    return dq, dk, dv


@contextlib.contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """The CPU has the kernels of a GPU, and uses them, in every dtype."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    with (
        patch.object(documents, "takes_rows", lambda device: True),
        patch.object(dense, "takes_rows", lambda device: True),
        patch.object(dense, "_has_kernel", lambda q, v: v.size(3) == q.size(3)),
        patch.object(CpuFlash, "refusal", lambda *_: "is left out"),
        patch.object(CudaFlash, "refusal", lambda *_: ""),
    ):
        try:
            yield
        finally:
            library._destroy()
