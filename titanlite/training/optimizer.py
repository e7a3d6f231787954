"""The optimizer and its learning-rate schedule, with TorchTitan's keys."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from titanlite.errors import ConfigError
from titanlite.modules.shards import local_part
from titanlite.training.muon import adjusted, orthogonalized


@dataclass(frozen=True)
class Rule:
    """Whether a parameter has weight decay, and the factor on its learning rate."""

    decays: bool = True
    lr_multiplier: float = 1.0
    matrices: str = ""
    """What Muon orthogonalizes: "matrix", or "stack" of matrices; "" for AdamW's parameters."""


def find_rules(
    names: Iterable[str],
    no_weight_decay: Sequence[str],
    lr_multipliers: Mapping[str, float],
    adamw: Sequence[str] = (),
    matrices: Mapping[str, str] | None = None,
) -> dict[str, Rule]:
    """The rule of each parameter name; patterns are those of fnmatch.

    The first pattern of `lr_multipliers` that matches counts. `matrices` are Muon's, of
    find_matrices, which `adamw` has chosen. Raises ConfigError for a pattern that matches no name.
    """
    names = list(names)
    keys: dict[str, Iterable[str]] = {
        "no_weight_decay": no_weight_decay,
        "lr_multipliers": lr_multipliers,
        "adamw": adamw,
    }
    unused = [
        f'optimizer.{key}: "{pattern}" matches no trained parameter; the names are like '
        f"{', '.join(dict.fromkeys((names[0], names[-1])))}"
        for key, patterns in keys.items()
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if unused:
        raise ConfigError(*unused)
    return {
        name: Rule(
            decays=not any(fnmatchcase(name, pattern) for pattern in no_weight_decay),
            lr_multiplier=next(
                (factor for p, factor in lr_multipliers.items() if fnmatchcase(name, p)), 1.0
            ),
            matrices=(matrices or {}).get(name, ""),
        )
        for name in names
    }


def base_lr(optimizer: Optimizer) -> float:
    """The current learning rate of parameters without a multiplier."""
    group = optimizer.param_groups[0]
    return group["lr"] / group.get("lr_multiplier", 1.0)


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    name: str = "AdamW",
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    momentum: float = 0.0,
    implementation: str = "fused",
    rules: Mapping[nn.Parameter, Rule] | None = None,
    build: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    **of_muon: Any,
) -> Optimizer:
    """AdamW, Adam, SGD or Muon over `parameters`; those in `rules` differ in decay, rate or kind.

    There is one parameter group for each mesh and rule, since the fused and foreach implementations
    take DTensors of one mesh. A group's "lr_multiplier" is its factor on the learning rate, and
    "matrices" its rule's. `of_muon` are Muon's nesterov, ns_steps, ns_dtype and adjust_lr_fn.
    `build` makes another optimizer of the groups.
    """
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups[mesh, (rules or {}).get(parameter, Rule())].append(parameter)
    options: dict[str, Any] = {
        "lr": lr,
        "weight_decay": weight_decay,
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
    }
    # A pipeline stage may have nothing to train, but torch refuses an optimizer without groups.
    param_groups = [
        {
            "params": group,
            "lr": lr * rule.lr_multiplier,
            "weight_decay": weight_decay if rule.decays else 0.0,
            "lr_multiplier": rule.lr_multiplier,
            "matrices": rule.matrices,
            **({"momentum": momentum, **of_muon} if rule.matrices else {}),
        }
        for (_, rule), group in (groups or {(None, Rule()): []}).items()
    ]
    if build is not None:
        return build(param_groups)
    if name == "SGD":
        return SGD(param_groups, momentum=momentum, **options)
    cls = {"AdamW": AdamW, "Adam": Adam, "Muon": Muon}[name]
    return cls(param_groups, betas=(beta1, beta2), eps=eps, **options)


class _UpdatesLocalShards:
    """Passes local shards to the kernels of Adam and AdamW, which update each element on its own.

    With DTensors the placements of all tensors would be propagated together. That costs a rank
    0.1 s of CPU time in the first step, and as much as the update itself in each later step. The
    optimizer state stays in DTensors, as checkpoints need it.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill `lists` with the tensors to update: parameters, gradients, and state."""
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        parameters, gradients, *_ = lists
        gradients[:] = map(_local_gradient, parameters, gradients)
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return has_complex


def _local_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """This rank's shard of a gradient, with the placements of its parameter."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return local_part(gradient)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient._local_tensor


# These have PyTorch's names, since a checkpoint stores the name of its optimizer.
class Adam(_UpdatesLocalShards, torch.optim.Adam):
    """torch.optim.Adam on the local shards of DTensors."""


class AdamW(_UpdatesLocalShards, torch.optim.AdamW):
    """torch.optim.AdamW on the local shards of DTensors."""


class Muon(AdamW):
    """torch.optim.Muon for the groups with "matrices", and AdamW for the others.

    Each matrix is orthogonalized as a whole (muon.py), on the device of its mesh, in `ns_dtype`;
    torch's is "bfloat16". Momentum, state and weights are sharded like the parameter.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Update the group's matrices here, and leave none of them to AdamW's kernel."""
        if not group["matrices"]:
            return super()._init_group(group, *lists)
        dtype, kind, lr = getattr(torch, group["ns_dtype"]), group["matrices"], group["lr"]
        parameters = [p for p in group["params"] if p.grad is not None]

        def update_of(parameter: Tensor) -> Tensor:
            assert parameter.grad is not None
            gradient, state = _local_gradient(parameter, parameter.grad), self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = local_part(state["momentum_buffer"])
            buffer.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
            device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else None
            return update.to(device, dtype)

        for parameter, update in orthogonalized(parameters, kind, update_of, group["ns_steps"]):
            local = local_part(parameter)
            local.mul_(1 - lr * group["weight_decay"])
            rate = lr * adjusted(group["adjust_lr_fn"], kind, parameter.shape)
            local.add_(update.to(local.device), alpha=-rate)
        return False


def build_scheduler(
    optimizer: Optimizer,
    *,
    warmup_steps: int,
    decay_steps: int,
    total_steps: int,
    decay_type: str = "linear",
    min_lr_factor: float = 0.0,
    factor: Callable[..., float] | None = None,
) -> LambdaLR:
    """A learning-rate schedule: linear warm-up, a constant rate, and a decay.

    The decay ends at `min_lr_factor` times the constant rate (arXiv 2404.06395). `factor` takes the
    place of lr_factor, without `decay_type`.
    """
    return LambdaLR(
        optimizer,
        partial(
            factor or partial(lr_factor, decay_type=decay_type),
            warmup_steps=warmup_steps,
            decay_steps=decay_steps,
            total_steps=total_steps,
            min_lr_factor=min_lr_factor,
        ),
    )


def lr_factor(
    step: int,
    *,
    warmup_steps: int,
    decay_steps: int,
    total_steps: int,
    decay_type: str = "linear",
    min_lr_factor: float = 0.0,
) -> float:
    """The factor on the learning rate at `step`, counted from 0, as in TorchTitan.

    The decay would reach its end one step after the last, so that the last step still learns.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_start = total_steps + 1 - decay_steps
    if step < decay_start or decay_steps == 0:
        return 1.0
    progress = min((step + 1 - decay_start) / decay_steps, 1.0)
    left = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[decay_type]
    return min_lr_factor + (1 - min_lr_factor) * left
