"""apply_compile: compile a model block by block, so that one graph serves all equal blocks."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch._inductor.config
import torch.compiler.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.parallelize.arguments import Plan, as_plan, check_choice, check_flags
from titanlite.parallelize.plan import find_container


def apply_compile(
    model: nn.Module,
    *,
    backend: str = "inductor",
    fullgraph: bool = True,
    plan: Plan | None = None,
) -> int:
    """Compile each block of `model` in place; return how many.

    Dynamo meets one block's code once and reuses its graph for every block of the same shape. With
    `fullgraph` a block that cannot be one graph raises instead of running in pieces. Raises
    TitanliteError for an argument that is wrong, and where `model` lacks the container of blocks
    that the plan names.
    """
    plan = as_plan("apply_compile", model, plan)
    check_flags("apply_compile", fullgraph=fullgraph)
    if not callable(backend):
        known = torch._dynamo.list_backends(exclude_tags=())
        check_choice("apply_compile", "backend", backend, known)
    # Every rank compiles at the same time: more workers than its share of cores only contend.
    torch._inductor.config.compile_threads = torch.get_num_threads()
    if dist.is_initialized() and dist.get_rank() != 0:
        # What it says of activation checkpointing is said once.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    container = find_container(model, plan, "compile")
    blocks = list(container.named_children())
    for key, block in blocks:
        compiled: Any = torch.compile(block, backend=backend, fullgraph=fullgraph)
        # Outside the graph: AOTAutograd differentiates a pending collective wrongly, in silence.
        compiled.register_forward_pre_hook(_wait_for_inputs)
        container.register_module(key, compiled)
    return len(blocks)


def keep_caches_apart(tp_mesh: DeviceMesh | None) -> None:
    """From now on compiled code on disk is found by ranks of the same place on `tp_mesh` alone.

    PyTorch looks for the code of a graph with DTensors by their whole shapes. But ranks may hold
    unequal shards (9 and 8 of 17 logits), and the name of the process group is in the code.
    """
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    if tp_mesh is not None:
        tag += f" {tp_mesh.get_group().group_name} {tp_mesh.get_local_rank()}"
    torch.compiler.config.cache_key_tag = tag


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
