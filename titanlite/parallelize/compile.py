"""apply_compile: compile a model block by block, so that one graph serves all equal blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titanlite.parallelize.plan import ParallelPlan, find_plan, match_modules


def apply_compile(
    model: nn.Module,
    *,
    backend: str = "inductor",
    fullgraph: bool = True,
    plan: ParallelPlan | None = None,
) -> int:
    """Compile each block of `model` in place; return how many.

    Dynamo meets one block's code once and reuses its graph for every block of the same shape. With
    `fullgraph` a block that cannot be one graph raises instead of running in pieces.
    """
    plan = plan or find_plan(model)
    # Every rank compiles at the same time: more workers than its share of cores only contend.
    torch._inductor.config.compile_threads = torch.get_num_threads()
    container = match_modules(model, plan.blocks).get(plan.blocks)
    if container is None:
        return 0
    blocks = list(container.named_children())
    for key, block in blocks:
        compiled: Any = torch.compile(block, backend=backend, fullgraph=fullgraph)
        # Outside the graph: AOTAutograd differentiates a pending collective wrongly, in silence.
        compiled.register_forward_pre_hook(_wait_for_inputs)
        container.register_module(key, compiled)
    return len(blocks)


def _wait_for_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_wait(value) if isinstance(value, Tensor) else value for value in inputs)


def _wait(tensor: Tensor) -> Tensor:
    return _Wait.apply(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Wait(torch.autograd.Function):
    """The result of a collective once it is there; its own `wait` would cut the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
