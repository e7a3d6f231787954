"""Finds the origin of a non-finite loss or gradient norm: the first module or parameter, and rank.

There are no hooks while values are finite. After a failed step every rank runs the step again with
a hook on each module, uncompiled so that the hooks see inside compiled blocks. The ranks then
combine what each saw first.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from titanlite.errors import number_ranks
from titanlite.mesh.parallel_dims import Grid
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part
from titanlite.ranks.peers import Peers


@dataclass(frozen=True)
class Sighting:
    """A tensor with non-finite values: its name, `count` of `total` values, and when in the step.

    `order` sorts the sightings of all ranks by time in the step. Microbatches count from 1.
    """

    name: str
    count: int
    total: int
    order: tuple[int, ...] = ()
    microbatch: int = 0


@dataclass
class Findings:
    """The first sighting of each kind on one rank; None if everything was finite."""

    parameter: Sighting | None = None
    gradient: Sighting | None = None
    """The gradient of a parameter after the failed step, first in backward order."""
    output: Sighting | None = None
    output_gradient: Sighting | None = None
    num_microbatches: int = 0


def explain_non_finite(
    parts: Mapping[int, nn.Module], run_again: Callable[[], float], world_mesh: DeviceMesh
) -> str:
    """What was non-finite first, as a sentence that is the same on every rank; all must call this.

    `parts` are this rank's stages of the model by number, with the gradients of the failed step.
    `run_again` runs that step's forward and backward passes and returns its loss.
    """
    mine = Findings(
        parameter=_first_of(parts, lambda parameter: parameter, 1),
        gradient=_first_of(parts, lambda parameter: parameter.grad, -1),
    )
    for part in parts.values():
        part.zero_grad(set_to_none=True)
    with watching(parts, mine), torch.compiler.set_stance("force_eager"):
        loss = run_again()
    sizes = zip(world_mesh.mesh_dim_names or (), world_mesh.mesh.shape, strict=True)
    grid = Grid(**dict(sizes))
    places = [grid.describe_place(rank) for rank in range(world_mesh.size())]
    return describe(Peers().gathered(mine), loss, places)


def describe(everyone: Sequence[Findings], loss: float, places: Sequence[str] = ()) -> str:
    """The findings of all ranks in words; `loss` is that of the second run.

    `places` are the mesh coordinates of each rank, such as "tp 1".
    """
    for kind, words in (
        ("parameter", "parameter {} itself"),
        ("output", "the output of {}"),
        ("output_gradient", "in the backward pass, the gradient of the output of {}"),
        ("gradient", "the gradient of parameter {}"),
    ):
        seen = {
            rank: sighting
            for rank, findings in enumerate(everyone)
            if (sighting := getattr(findings, kind)) is not None
        }
        if not seen:
            continue
        first = min(seen.values(), key=lambda sighting: sighting.order)
        ranks = [rank for rank, sighting in seen.items() if sighting.order == first.order]
        text = f"first non-finite tensor: {words.format(first.name or 'the whole model')} on "
        text += _name_ranks(ranks, places)
        if first.microbatch and everyone[ranks[0]].num_microbatches > 1:
            text += f", microbatch {first.microbatch} of {everyone[ranks[0]].num_microbatches}"
        count = sum(seen[rank].count for rank in ranks)
        total = sum(seen[rank].total for rank in ranks)
        return f"{text}, {count:,} of {total:,} values"
    if not math.isfinite(loss):
        return "every module output is finite, but the loss is not"
    return (
        "a second run of the step is finite, and so are all gradients of the first: their norm "
        "overflows, or the machine computes wrongly"
    )


@contextlib.contextmanager
def watching(parts: Mapping[int, nn.Module], findings: Findings) -> Iterator[None]:
    """Inside, `findings` collects the first sightings in the passes of `parts`."""
    handles: list[Any] = []
    for stage, part in parts.items():
        watch = _Watch(stage, findings)
        handles.append(part.register_forward_pre_hook(watch.begin))
        for name, module in part.named_modules():
            hook = watch.make_output_hook(canonical_name(name))
            handles.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Watch:
    """The hooks of one stage."""

    stage: int
    findings: Findings
    microbatch: int = 0
    calls: int = 0
    gradients: int = 0

    def begin(self, _module: nn.Module, _inputs: Any) -> None:
        self.microbatch += 1
        self.calls = 0
        self.findings.num_microbatches = max(self.findings.num_microbatches, self.microbatch)

    def make_output_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.calls += 1
            microbatch = self.microbatch
            tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
            for tensor in filter(torch.is_floating_point, tensors):
                order = (microbatch, self.stage, self.calls)
                seen = self.findings.output
                if seen is None or order < seen.order:
                    found = _sight(name, tensor, order, microbatch)
                    self.findings.output = found or seen
                if tensor.requires_grad:
                    tensor.register_hook(make_gradient_hook(microbatch))

        def make_gradient_hook(microbatch: int) -> Callable[[Tensor], None]:
            def note_gradient(gradient: Tensor) -> None:
                self.gradients += 1
                # The backward pass begins at the last stage.
                order = (-self.stage, self.gradients)
                seen = self.findings.output_gradient
                if seen is None or order < seen.order:
                    found = _sight(name, gradient, order, microbatch)
                    self.findings.output_gradient = found or seen

            return note_gradient

        return note_output


def _first_of(
    parts: Mapping[int, nn.Module], tensor_of: Callable[[Tensor], Tensor | None], direction: int
) -> Sighting | None:
    """The first tensor with non-finite values, in forward (1) or backward (-1) order."""
    found = []
    for stage, part in parts.items():
        for index, (name, parameter) in enumerate(part.named_parameters()):
            tensor = tensor_of(parameter)
            if tensor is not None:
                order = (direction * stage, direction * index)
                found.append(_sight(canonical_name(name), tensor, order))
    return min((one for one in found if one), key=lambda one: one.order, default=None)


@torch.no_grad()
def _sight(
    name: str, tensor: Tensor, order: tuple[int, ...], microbatch: int = 0
) -> Sighting | None:
    local = local_part(tensor)
    count = local.numel() - int(torch.isfinite(local).sum())
    return Sighting(name, count, local.numel(), order, microbatch) if count else None


def _name_ranks(ranks: Sequence[int], places: Sequence[str]) -> str:
    if len(ranks) == 1:
        place = places[ranks[0]] if places else ""
        return f"rank {ranks[0]} ({place})" if place else f"rank {ranks[0]}"
    return number_ranks(ranks)
