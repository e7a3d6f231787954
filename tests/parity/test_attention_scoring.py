"""Windows, sinks and soft-capped scores: ring attention is as attention on one rank."""

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from flash import kernels_of_a_gpu
from torch import Tensor
from training import on_ranks

from titanlite.modules.attention import LAYOUTS, make_layout
from titanlite.modules.attention.dense import attend
from titanlite.modules.attention.layout import Layout
from titanlite.parallelize.context_parallel import ring
from titanlite.parallelize.context_parallel.ring import RingAttention
from titanlite.ranks.world import World

LOCAL, HEADS = 24, 4
CASES: list[dict[str, Any]] = [
    {"window": 7},
    {"window": 40},
    {"softcap": 1.5},
    {"sinks": True},
    {"window": 30, "softcap": 2.0, "sinks": True, "starts": [[33, 66]] * 2},
]
# Where documents start: one; uneven ones, the last of a token or of padding; short ones.
STARTS = (None, [[5, 6, 36, 47], [20, 40]], [[*range(1, 25), 28, 33], [7, 24, 25, 48]])
WINDOWS = (None, 1, 2, 5, 13, 24, 40)


def inputs(num_ranks: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v of a smaller size and the gradient of the output; sinks."""
    generator = torch.Generator().manual_seed(0)
    heads, sizes = (HEADS, 2, 2, HEADS), (8, 8, 6, 6)
    tensors = [
        torch.randn(2, h, num_ranks * LOCAL, e, generator=generator, dtype=torch.float64)
        for h, e in zip(heads, sizes, strict=True)
    ]
    return tensors, torch.randn(HEADS, generator=generator, dtype=torch.float64)


def documents_of(starts: list[list[int]] | None, length: int) -> Tensor | None:
    places = torch.arange(length)
    return starts and torch.stack(
        [torch.bucketize(places, torch.tensor(s), right=True) for s in starts]
    )


def results(attention: Any, tensors: list[Tensor], sinks: Tensor | None, **keys: Any) -> Any:
    """The output, and the gradients of q, k, v and the sinks."""
    *qkv, grad = tensors
    leaves = [part.detach().clone().requires_grad_() for part in qkv]
    given = None if sinks is None else sinks.clone().requires_grad_()
    out = attention(*leaves, sinks=given, **keys)
    wanted = leaves if given is None else [*leaves, given]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def errors(world: World, cases: list[dict[str, Any]]) -> list[float]:
    """How far the ring's outputs and gradients are from those of the whole sequence."""
    tensors, sinks = inputs(world.size)
    found = []
    for case in cases:
        keys = {name: case[name] for name in ("window", "softcap") if name in case}
        of_case = sinks if case.get("sinks") else None
        whole = documents_of(case.get("starts"), tensors[0].size(2))
        expected = results(attend, tensors, of_case, documents=whole, **keys)
        for name, method in product(LAYOUTS, ("alltoall", "allgather")):
            layout = make_layout(name, world.size)

            def cut(tensor: Tensor, dim: int = 2, layout: Layout = layout) -> Tensor:
                return layout.shard(tensor, dim, world.rank)

            attention = RingAttention(dist.group.WORLD, layout, method)
            held = None if whole is None else cut(whole, 1)
            own = results(attention, [cut(t) for t in tensors], of_case, documents=held, **keys)
            parts = [*map(cut, expected[:4]), *expected[4:]]
            if of_case is not None:
                dist.all_reduce(own[4])
            found += [float((a - b).abs().max()) for a, b in zip(own, parts, strict=True)]
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_ring_scores_as_one_rank(num_ranks: int) -> None:
    assert max(max(of_rank) for of_rank in on_ranks(errors, num_ranks, CASES)) < 1e-12


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_ring_has_no_mask_on_a_gpu(num_ranks: int) -> None:
    """Against masks on one rank, since the values are shorter than the keys there."""
    cases = [{"window": window, "starts": of} for window, of in product(WINDOWS, STARTS)]
    cases.append({"window": 13, "sinks": True, "starts": STARTS[1]})
    with kernels_of_a_gpu(), patch.object(ring, "_mask", None):
        found = on_ranks(errors, num_ranks, cases, threads=True)
    assert max(map(max, found)) < 1e-13


def test_one_rank_scores_by_the_definition() -> None:
    (q, k, v, _), sinks = inputs(2)
    out = attend(q, k, v, window=30, softcap=2.0, sinks=sinks)
    for head, position in product(range(HEADS), (0, 5, 47)):
        keys = slice(max(0, position - 29), position + 1)
        scores = k[1, head // 2, keys] @ q[1, head, position] * 8**-0.5
        scores = 2.0 * torch.tanh(scores / 2.0)
        shares = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
        torch.testing.assert_close(out[1, head, position], shares @ v[1, head // 2, keys])
