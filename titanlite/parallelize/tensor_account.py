"""The account of every tensor of a job: who holds it, how it lies, and what completes its gradient.

    account_of      the accounts of this rank's parts of a parallelized model
    require_whole   that together they are the plain model, and that each has an answer

A parameter that is replicated over a mesh axis trains right only if something completes its
gradient over that axis: FSDP2, DDP, DTensor, or the step. A tensor without an answer stops the job
before it trains. self_check.py compares the copies that must be equal according to the account.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlite.errors import TitanliteError
from titanlite.mesh.parallel_dims import ParallelDims, axes_of, axes_where
from titanlite.modules.gradient_sums import marks_of
from titanlite.modules.shards import buffers_of, is_sharded, parameters_of
from titanlite.parallelize.float8.apply import compact
from titanlite.parallelize.plan import ParallelPlan, matches
from titanlite.plan_row import PlanRow

PARAMETER, BUFFER = "parameter", "buffer"
REPLICATED, LOCAL = "replicated", "local"
# What completes a gradient over an axis over which the parameter is replicated.
FSDP, DDP, STYLE, STEP, STAGES = "FSDP2", "DDP", "DTensor", "the step", "the step, over stages"
WHOLE = "whole on each rank"

STATISTICS = torch.nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class TensorAccount:
    """One parameter or persistent buffer.

    `stages` are the pipeline stages that hold it. `layout` maps each axis in use except pp to
    "shard D" (dimension D), "replicated" or, for a buffer whose ranks may differ, "local".
    `completed` maps each axis over which ranks compute parts of a trained parameter's gradient to
    what completes it there, "" if nothing does: each axis over which it is replicated, those over
    which FSDP2 shards it and, with several stages, "pp".
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    is_trained: bool
    stages: tuple[int, ...]
    layout: Mapping[str, str]
    completed: Mapping[str, str] = field(default_factory=dict)

    @property
    def copied_over(self) -> tuple[str, ...]:
        """The axes along which ranks hold copies that must be equal."""
        equal = [axis for axis, how in self.layout.items() if how == REPLICATED]
        is_local = LOCAL in self.layout.values()
        return (*(("pp",) if len(self.stages) > 1 and not is_local else ()), *equal)


def account_of(
    parts: Mapping[int, nn.Module], dims: ParallelDims, plan: ParallelPlan, tied: Mapping[str, str]
) -> dict[str, TensorAccount]:
    """The accounts of this rank's `parts`, its pipeline stages by number, by canonical name.

    `tied` is find_tied of the plain model.
    """
    accounts: dict[str, TensorAccount] = {}
    for stage, part in parts.items():
        for name, one in _of_part(part, stage, dims, plan, tied):
            known = accounts.get(name)
            stages = one.stages if known is None else (*known.stages, stage)
            accounts[name] = replace(known or one, stages=stages)
    return accounts


def merged(everyone: Iterable[Mapping[str, TensorAccount]]) -> dict[str, TensorAccount]:
    """The accounts of the ranks of a pipeline as one; a tensor of several stages is completed."""
    found: dict[str, TensorAccount] = {}
    for accounts in everyone:
        for name, one in accounts.items():
            known = found.get(name, replace(one, stages=()))
            found[name] = replace(known, stages=tuple(sorted({*known.stages, *one.stages})))
    for name, one in found.items():
        if len(one.stages) > 1 and one.is_trained:
            found[name] = replace(one, completed={"pp": STAGES, **one.completed})
    return found


def require_whole(
    accounts: Mapping[str, TensorAccount], plain: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Check the accounts of all stages against `plain`, the plain model: name -> (kind, shape).

    Raises TitanliteError for a tensor that no stage holds, that the plain model does not have, that
    has another shape there, or whose gradient nothing completes.
    """
    for name, (kind, shape) in plain.items():
        one = accounts.get(name)
        if one is None:
            raise TitanliteError(
                f"{name}: no rank holds this {kind}; put its module in a stage, or in none"
            )
        if one.shape != shape:
            raise TitanliteError(
                f"{name}: it is {list(shape)} in the plain model, but {list(one.shape)} after it "
                "was parallelized; a style must keep the shape of the whole parameter"
            )
    for name, one in accounts.items():
        if name not in plain:
            raise TitanliteError(
                f"{name}: the plain model has no such {one.kind}; a parallelize step has added it, "
                "or renamed one"
            )
        for axis, how in one.completed.items():
            if not how:
                raise TitanliteError(
                    f"{name}: it is replicated over {axis}, and nothing completes its gradient "
                    "there; put its module inside what FSDP2 or DDP wraps, or set requires_grad "
                    "to False"
                )


def tensors_of(model: nn.Module, tied: Mapping[str, str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The parameters and persistent buffers of a plain model: name -> (kind, shape).

    Raises TitanliteError for two tensors of one name, and for one without a shape.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise TitanliteError(
                f"{name}: a lazy parameter has no shape before the model has run; give its module "
                "the sizes, as in nn.Linear(in_features, out_features)"
            )
    found = {n: (PARAMETER, tuple(p.shape)) for n, p in parameters_of([model], tied).items()}
    return found | {n: (BUFFER, tuple(b.shape)) for n, b in buffers_of([model]).items()}


def _of_part(
    part: nn.Module, stage: int, dims: ParallelDims, plan: ParallelPlan, tied: Mapping[str, str]
) -> Iterator[tuple[str, TensorAccount]]:
    used = [axis for axis in dims.axes_in_use if axis not in axes_where(weights="stages")]
    # FSDP2 reduces the gradients of its own shards.
    reduced = axes_where(weights="sharded")
    summed = {
        tied.get(name, name): {axis for mark in marks for axis in axes_of(mark.axis)}
        for name, marks in marks_of(part).items()
    }
    for name, parameter in parameters_of([part], tied).items():
        placed = _placed(parameter)
        layout = {axis: placed.get(axis, REPLICATED) for axis in used}
        completed = {
            axis: _completed(part, parameter, axis, summed.get(name, set()), axis in placed)
            for axis, how in layout.items()
            if parameter.requires_grad and (how == REPLICATED or axis in reduced)
        }
        shape, trained = tuple(parameter.shape), parameter.requires_grad
        yield name, TensorAccount(name, PARAMETER, shape, trained, (stage,), layout, completed)
    may_differ = _local_buffers(part, plan)
    for name, buffer in buffers_of([part]).items():
        # Ranks along tp see the same samples, but of a sequence that is sharded other tokens.
        how = LOCAL if name in may_differ else REPLICATED
        layout = dict.fromkeys(used, how)
        yield name, TensorAccount(name, BUFFER, tuple(buffer.shape), False, (stage,), layout)


def _placed(tensor: Tensor) -> dict[str, str]:
    """Axis -> how a DTensor is placed on it; a plain tensor is placed on none."""
    if not isinstance(tensor, DTensor):
        return {}
    placed: dict[str, str] = {}
    names = tensor.device_mesh.mesh_dim_names or ()
    for name, placement in zip(names, tensor.placements, strict=True):
        how: Any = placement
        for axis in axes_of(name):
            if is_sharded(placement):
                placed[axis] = f"shard {how.dim}"
            else:
                placed.setdefault(axis, REPLICATED)
    return placed


def _completed(
    part: nn.Module, parameter: Tensor, axis: str, summed: set[str], is_placed: bool
) -> str:
    if axis in summed:
        return STEP
    if axis in axes_where(weights="cut"):
        return STYLE if is_placed else WHOLE
    if isinstance(part, FSDPModule):
        return FSDP if is_placed else ""
    return DDP if hasattr(part, "set_requires_gradient_sync") else ""


def _local_buffers(part: nn.Module, plan: ParallelPlan) -> set[str]:
    """The buffers that may differ between ranks: statistics of batches, and those of the plan."""
    named = buffers_of([part])
    found = {name for name in named if any(matches(name, p) for p in plan.local_buffers)}
    for module in part.modules():
        if isinstance(module, STATISTICS) and not isinstance(module, nn.SyncBatchNorm):
            own = {id(buffer) for buffer in module.buffers(recurse=False)}
            found |= {name for name, buffer in named.items() if id(buffer) in own}
    return found


def summed_row(accounts: Mapping[str, TensorAccount]) -> list[PlanRow]:
    """A row of the effective plan for the gradients that the step itself sums, if any."""
    names: dict[str, list[str]] = {}
    for name, one in accounts.items():
        axes = [axis for axis, how in one.completed.items() if how in (STEP, STAGES)]
        if axes:
            names.setdefault(" and ".join(axes), []).append(name)
    if not names:
        return []
    notes = [f"over {axes}: {', '.join(compact(found))}" for axes, found in names.items()]
    total = sum(one.kind == PARAMETER for one in accounts.values())
    number = f"{sum(map(len, names.values()))} of {total} tensors"
    return [PlanRow("summed gradients", number, number, "; ".join(notes))]
