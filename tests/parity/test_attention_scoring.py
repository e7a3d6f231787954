"""Windows, sinks and soft-capped scores: ring attention is as attention on one rank."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training import on_ranks

from titanlite.modules.attention import LAYOUTS, make_layout
from titanlite.modules.attention.dense import attend
from titanlite.modules.attention.layout import Layout
from titanlite.parallelize.context_parallel.ring import RingAttention
from titanlite.ranks.world import World

LOCAL, HEADS = 24, 4
CASES: list[dict[str, Any]] = [
    {"window": 7},
    {"window": 40},
    {"softcap": 1.5},
    {"sinks": True},
    {"window": 30, "softcap": 2.0, "sinks": True, "documents": True},
]


def inputs(num_ranks: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v of a smaller size and the gradient of the output; sinks; documents."""
    generator = torch.Generator().manual_seed(0)
    heads, sizes = (HEADS, 2, 2, HEADS), (8, 8, 6, 6)
    tensors = [
        torch.randn(2, h, num_ranks * LOCAL, e, generator=generator, dtype=torch.float64)
        for h, e in zip(heads, sizes, strict=True)
    ]
    documents = torch.arange(num_ranks * LOCAL).expand(2, -1) // 33
    return tensors, torch.randn(HEADS, generator=generator, dtype=torch.float64), documents


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
    tensors, sinks, documents = inputs(world.size)
    found = []
    for case in cases:
        keys = {name: case[name] for name in ("window", "softcap") if name in case}
        of_case = sinks if case.get("sinks") else None
        whole = documents if case.get("documents") else None
        expected = results(attend, tensors, of_case, documents=whole, **keys)
        for name, method in product(LAYOUTS, ("alltoall", "allgather")):
            layout = make_layout(name, world.size)

            def cut(tensor: Tensor, dim: int = 2, layout: Layout = layout) -> Tensor:
                return layout.shard(tensor, dim, world.rank)

            ring = RingAttention(dist.group.WORLD, layout, method)
            held = None if whole is None else cut(whole, 1)
            own = results(ring, [cut(t) for t in tensors], of_case, documents=held, **keys)
            parts = [*map(cut, expected[:4]), *expected[4:]]
            if of_case is not None:
                dist.all_reduce(own[4])
            found += [float((a - b).abs().max()) for a, b in zip(own, parts, strict=True)]
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_ring_scores_as_one_rank(num_ranks: int) -> None:
    assert max(max(of_rank) for of_rank in on_ranks(errors, num_ranks, CASES)) < 1e-12


def test_one_rank_scores_by_the_definition() -> None:
    (q, k, v, _), sinks, _ = inputs(2)
    out = attend(q, k, v, window=30, softcap=2.0, sinks=sinks)
    for head, position in product(range(HEADS), (0, 5, 47)):
        keys = slice(max(0, position - 29), position + 1)
        scores = k[1, head // 2, keys] @ q[1, head, position] * 8**-0.5
        scores = 2.0 * torch.tanh(scores / 2.0)
        shares = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
        torch.testing.assert_close(out[1, head, position], shares @ v[1, head // 2, keys])
