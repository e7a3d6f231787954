"""Gradients that a step sums over a mesh axis because nothing else does.

FSDP2, DDP and DTensor complete the gradients of the parameters that they hold. A few parameters are
held by none of them over some axis: one that the tensor-parallel plan does not cover, used on a
shard of the sequence, or a scalar, which FSDP2 cannot shard. A parallelize step marks such a
parameter with `sum_gradient`, and the step of training sums its gradient with `GradientSums`.

A mark belongs to the module that owns the parameter, since FSDP2 replaces the parameter itself.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titanlite.errors import TitanliteError
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part

MARKS = "titanlite_gradient_sums"


class Mark(NamedTuple):
    """One axis over which a gradient is summed.

    With `differs`, the ranks along the axis have different parts of the sum. If their gradients
    are all equal, each has the whole sum, and the mark is wrong.
    """

    axis: str
    group: dist.ProcessGroup
    differs: bool = False


def sum_gradient(
    owner: nn.Module, leaf: str, axis: str, group: dist.ProcessGroup, *, differs: bool = False
) -> None:
    """Mark the parameter `leaf` of the module `owner`: its gradient is summed over `group`.

    `group` are the ranks along the mesh axis `axis`. `differs` is that of Mark.
    """
    marks: dict[str, tuple[Mark, ...]] = owner.__dict__.setdefault(MARKS, {})
    kept = tuple(mark for mark in marks.get(leaf, ()) if mark.axis != axis)
    marks[leaf] = (*kept, Mark(axis, group, differs))


def clear_sums(owner: nn.Module) -> None:
    """Remove the marks of the module's own parameters, which something else completes now."""
    owner.__dict__.pop(MARKS, None)


def marks_of(model: nn.Module) -> dict[str, tuple[Mark, ...]]:
    """The marks of each marked parameter of `model`, by canonical name."""
    return {name: marks for name, _, marks in _marked([model])}


def _marked(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter, tuple[Mark, ...]]]:
    for part in parts:
        for prefix, module in part.named_modules():
            for leaf, marks in module.__dict__.get(MARKS, {}).items():
                parameter = module._parameters.get(leaf)
                if parameter is not None:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    yield canonical_name(name), parameter, marks


class GradientSums:
    """Sums the gradients of the marked parameters of this rank's parts of a model.

    The first sum that is not zero also shows whether the marks with `differs` are right: gradients
    that are equal on all ranks were complete already.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._parts = list(parts)
        self._is_seen: set[tuple[str, str]] = set()

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the marked gradients, with one all-reduce for each axis, dtype and device.

        A rank without a gradient adds zero, if another rank of the axis has one. Every rank must
        call this. Raises TitanliteError if a gradient is complete on each rank already.
        """
        pending: dict[Any, list[tuple[str, nn.Parameter, Mark]]] = {}
        for name, parameter, marks in _marked(self._parts):
            if parameter.requires_grad:
                for mark in marks:
                    if mark.group.size() > 1:
                        key = mark.axis, mark.group, parameter.dtype, local_part(parameter).device
                        pending.setdefault(key, []).append((name, parameter, mark))
        for (_, group, _, _), members in pending.items():
            self._sum_joined(group, members)

    def _sum_joined(
        self, group: dist.ProcessGroup, members: list[tuple[str, nn.Parameter, Mark]]
    ) -> None:
        own = [local_part(p if p.grad is None else p.grad) for _, p, _ in members]
        # The number of ranks with a gradient: without one on any rank, it stays None.
        flags = own[0].new_tensor([float(p.grad is not None) for _, p, _ in members])
        flat = [
            torch.zeros_like(local).flatten() if p.grad is None else local.flatten()
            for local, (_, p, _) in zip(own, members, strict=True)
        ]
        joined = torch.cat([*flat, flags])
        dist.all_reduce(joined, group=group)
        *sums, counts = joined.split([*(part.numel() for part in flat), len(members)])
        # A planned step has no values.
        has_values = not isinstance(joined, FakeTensor)
        has_gradient = [True] * len(members)
        if has_values and any(p.grad is None for _, p, _ in members):
            has_gradient = (counts > 0).tolist()
        for (name, parameter, mark), total, part, used in zip(
            members, sums, flat, has_gradient, strict=True
        ):
            if not used:
                continue
            if mark.differs and has_values and (name, mark.axis) not in self._is_seen:
                self._require_parts(name, mark, part, total)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local = local_part(parameter.grad)
            local.copy_(total.view_as(local))

    def _require_parts(self, name: str, mark: Mark, part: Tensor, total: Tensor) -> None:
        """Raises TitanliteError if every rank's gradient is `total` over the number of ranks."""
        size = total.abs().max() if total.numel() else total.new_zeros(())
        if not size > 0:
            return
        self._is_seen.add((name, mark.axis))
        rounding = 100 * torch.finfo(total.dtype).eps
        if bool((part * mark.group.size() - total).abs().max() <= rounding * size):
            raise TitanliteError(
                f"{name}: its gradient is equal on all {mark.group.size()} ranks of {mark.axis}, "
                "so each has the whole gradient, but it was to be summed over them, as that of a "
                "parameter that works on shards of the sequence; name it in whole_gradients of "
                "the ParallelPlan"
            )
