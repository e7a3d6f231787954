"""ParallelPlan: how a model can be parallelized, as data in plan.py beside the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

from titanlite.errors import TitanliteError


@dataclass(frozen=True)
class ParallelPlan:
    """How a model class is parallelized.

    `tensor_parallel` maps module names of the plain model to TP styles; `*` stands for one part of
    a name. `loss_parallel` overrides its entries if the loss is computed on logits sharded over the
    vocabulary. `blocks` names the container of the repeated blocks: activation checkpointing,
    compile and FSDP work block by block. `embeddings` and `head` name the modules before and after
    the blocks; each group is one FSDP unit. `attention` is the name, within a block, of the module
    that takes q, k and v, and `is_causal` says whether it is causal. `sequence_dim` is the
    dimension along which tensor parallelism shards the activations between blocks; None if they
    are replicated (no sequence parallelism). In a pipeline stage, the modules of
    other stages are None (split_model). If the model's own forward cannot skip those,
    `stage_forward(stage, x, ...)` is the forward of a stage.

    The last three name parameters and buffers by patterns as in `tensor_parallel`. Parameters
    without a style are trained under tensor parallelism, too (apply_tp). If it takes the wrong way
    for one, `partial_gradients` names those whose gradient on each rank is a part of the sum over
    the tensor axis, and `whole_gradients` those whose gradient is complete on each rank.
    `local_buffers` names persistent buffers that may differ between ranks that read different data,
    such as a moving average of activations.
    """

    tensor_parallel: Mapping[str, ParallelStyle] = field(default_factory=dict)
    loss_parallel: Mapping[str, ParallelStyle] = field(default_factory=dict)
    blocks: str = "layers"
    embeddings: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    attention: str = "attention.inner"
    is_causal: bool = True
    sequence_dim: int | None = 0
    stage_forward: Callable[..., Any] | None = None
    partial_gradients: tuple[str, ...] = ()
    whole_gradients: tuple[str, ...] = ()
    local_buffers: tuple[str, ...] = ()


def find_plan(model: nn.Module) -> ParallelPlan:
    """The plan registered for the model's class: `PLANS[class]` in plan.py beside its module.

    It is a ParallelPlan, or a function from the model to its plan. Raises TitanliteError if there
    is none.
    """
    # FSDP2 and replicate insert their own class before the model's.
    for cls in type(model).__mro__:
        package = getattr(sys.modules.get(cls.__module__), "__package__", None)
        if package and find_spec(package) and find_spec(f"{package}.plan"):
            plans = getattr(import_module(f"{package}.plan"), "PLANS", {})
            if cls in plans:
                found = plans[cls]
                return found(model) if callable(found) else found
    raise TitanliteError(
        f"{type(model).__name__} has no parallelize plan; give one, or add it to PLANS in the "
        "plan.py beside its module"
    )


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches `pattern`; `*` stands for one part of a name, or within one."""
    own, parts = name.split("."), pattern.split(".")
    return len(own) == len(parts) and all(map(fnmatchcase, own, parts))


def match_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The submodules whose names match `pattern`, as in `matches`."""
    return {name: module for name, module in model.named_modules() if matches(name, pattern)}


def find_container(model: nn.Module, plan: ParallelPlan, step: str) -> nn.Module:
    """The module that contains the blocks; in a pipeline stage it may be empty.

    Raises TitanliteError if `model` lacks it, because `step` would then do nothing.
    """
    containers = match_modules(model, plan.blocks)
    if plan.blocks not in containers:
        raise TitanliteError(
            f"{type(model).__name__} has no module '{plan.blocks}', whose children are the blocks "
            f"that {step} works on; name it in the plan's `blocks`"
        )
    return containers[plan.blocks]


def find_blocks(model: nn.Module, plan: ParallelPlan) -> dict[str, nn.Module]:
    """The repeated blocks of `model` by their key in the container; empty if it has none."""
    containers = match_modules(model, plan.blocks)
    return dict(containers[plan.blocks].named_children()) if containers else {}
