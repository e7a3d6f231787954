"""apply_compile: compile a model block by block, so that equal blocks share one graph."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _NormBase

from titanlite.errors import TitanliteError
from titanlite.modules.experts import expert_layers
from titanlite.modules.names import canonical_name
from titanlite.parallelize.activation_checkpoint.buffers import Place, has_buffers, places_of
from titanlite.parallelize.arguments import Plan, as_plan, check_choice, check_flags
from titanlite.parallelize.plan import find_container
from titanlite.ranks import settings


@dataclass(frozen=True)
class CompileReport:
    """What apply_compile did: the blocks that it compiled."""

    blocks: tuple[str, ...]


def apply_compile(
    model: nn.Module, *, backend: str = "inductor", fullgraph: bool = True, plan: Plan | None = None
) -> CompileReport:
    """Compile each block of `model` in place; blocks with the same shapes share a graph.

    With `fullgraph`, a graph break in a block raises an error, except in blocks with experts:
    routing, dispatch and the routed experts are not compiled there, because their shapes depend on
    values. Raises TitanliteError for an invalid argument, and if `model` lacks the plan's container
    of blocks.
    """
    plan = as_plan("apply_compile", model, plan)
    check_flags("apply_compile", fullgraph=fullgraph)
    if not callable(backend):
        known = torch._dynamo.list_backends(exclude_tags=())
        check_choice("apply_compile", "backend", backend, known)
    # All ranks compile at the same time, so each uses only its share of the cores.
    settings.change(settings.COMPILE_THREADS, torch.get_num_threads())
    if dist.is_initialized() and dist.get_rank() != 0:
        settings.silence_compiler()
    container = find_container(model, plan, "compile")
    blocks = list(container.named_children())
    for key, block in blocks:
        whole = fullgraph and not expert_layers([block])
        compiled: Any = torch.compile(block, backend=backend, fullgraph=whole)
        # Wait outside the graph: AOTAutograd silently computes wrong gradients of a pending
        # collective.
        compiled.register_forward_pre_hook(_wait_for_inputs)
        recomputes = torch._functorch.config.activation_memory_budget < 1
        if has_buffers(block) and (recomputes or isinstance(block, CheckpointWrapper)):
            _refuse_changed_buffers(compiled, block, plan.block_name(key))
        container.register_module(key, compiled)
    return CompileReport(tuple(plan.block_name(key) for key, _ in blocks))


def keep_caches_apart(tp_mesh: DeviceMesh | None) -> None:
    """Give each rank of `tp_mesh` its own entries in the compile cache on disk, from now on.

    The cache key of a graph with DTensors contains only their full shapes. But ranks may hold
    unequal shards (9 and 8 of 17 logits), and the code contains the name of the process group.
    """
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    if tp_mesh is not None:
        tag += f" {tp_mesh.get_group().group_name} {tp_mesh.get_local_rank()}"
    settings.change(settings.CACHE_TAG, tag)


def _refuse_changed_buffers(compiled: nn.Module, block: nn.Module, name: str) -> None:
    """Raise TitanliteError when a forward pass changes a buffer that its recomputation may read.

    The graph of the backward pass gets the buffer itself, which then has its new value. The running
    statistics of batch norms may change: the outputs of a training step do not depend on them.
    """
    found: dict[Place, tuple[Tensor | None, int]] = {}

    def state_of(place: Place) -> tuple[Tensor | None, int]:
        tensor = place[0]._buffers.get(place[1])
        return tensor, 0 if tensor is None else tensor._version

    def before(*_: Any) -> None:
        if torch.is_grad_enabled():
            found.update({place: state_of(place) for place in places_of(block)})

    def after(*_: Any) -> None:
        for place, (tensor, version) in found.items():
            module, own = place
            now, number = state_of(place)
            if (now is not tensor or number != version) and not isinstance(module, _NormBase):
                path = next(path for path, one in block.named_modules() if one is module)
                buffer = canonical_name(".".join(filter(None, (name, path, own))))
                raise TitanliteError(
                    f"compile.enable: the forward pass changes the buffer {buffer}, and the "
                    "compiler would recompute activations from its new value; set "
                    'activation_checkpoint.mode = "none" or compile.enable = false'
                )
        found.clear()

    # Otherwise Dynamo fails on a buffer that is assigned, before the check can name it.
    if hasattr(torch._dynamo.config, settings.SKIPS_SIDE_EFFECTS.name):
        settings.change(settings.SKIPS_SIDE_EFFECTS, True)
    compiled.register_forward_pre_hook(before)
    compiled.register_forward_hook(after)


def _wait_for_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_Wait.apply(x) if isinstance(x, AsyncCollectiveTensor) else x for x in inputs)


class _Wait(torch.autograd.Function):
    """Waits for a collective's result; calling `wait` alone would cut it off from autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
