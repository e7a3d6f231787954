"""On a rank: which part of each of the reference's tensors it holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import Grid
from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import digest_of
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.subject import Cut, LocalPart
from titanlite.tools.verify.tracing import gathered
from titanlite.tools.verify.wording import listed

MOST_PROBLEMS = 4
# Of larger tensors no slices are looked for.
MOST_ELEMENTS = 1 << 24


def find_parts(
    parameters: Mapping[str, nn.Parameter],
    start: Mapping[str, Tensor],
    request: Request,
    grid: Grid,
    rank: int,
) -> dict[str, LocalPart]:
    """The parts of the reference's tensors that this rank holds; every rank must call this.

    `start` has the reference's starting values. Raises ConfigError for names and shapes that do not
    fit.
    """
    check_names(parameters, start, rank)
    declared, split = request.shard, request.split
    given_axes = {split} if isinstance(split, str) else split
    split_axes: Collection[str] = () if given_axes is None or callable(given_axes) else given_axes
    given = {name: declared(name) if declared is not None else None for name in parameters}
    undeclared = {n: p for n, p in parameters.items() if given[n] is None}
    chunks = _chunks(undeclared, start, grid, rank)
    fused = _fused(undeclared, start, chunks, grid, rank)
    # Of axes that fit, the one of other tensors; code seldom shards over an axis that cuts batches.
    used = {axes[0] for _, axes in chunks.values() if len(axes) == 1}
    local: dict[str, LocalPart] = {}
    problems: list[str] = []
    for name, parameter in parameters.items():
        shape = start[name].shape
        cut: Cut = _whole
        try:
            if given[name] is not None:
                cut = _declared(name, given[name], grid, rank)
            elif name in fused:
                cut = fused[name]
            elif parameter.shape != shape:
                dim, axes = chunks.get(name, (0, []))
                choices = (
                    axes,
                    [a for a in axes if a in used],
                    [a for a in axes if a not in split_axes],
                )
                found = next((own for own in choices if len(own) == 1), None)
                if found is None:
                    why = f"{listed(axes)} fit" if axes else "no single axis explains that"
                    raise ConfigError(
                        f"shard: on rank {rank} {name} has shape {list(parameter.shape)}, the "
                        f"reference's {list(shape)}, and {why}; give shard=, a function from a "
                        "name to (dim, axis)"
                    )
                cut = Chunk(dim, grid.coordinates(rank)[found[0]], grid.degrees[found[0]])
            local[name] = LocalPart(shape, parameter, cut)
            got = local[name].part_of(torch.empty(shape, device="meta")).shape
            if isinstance(cut, Chunk) and got != local_part(parameter).shape:
                local[name] = LocalPart(shape, parameter, replace(cut, is_balanced=True))
                got = local[name].part_of(torch.empty(shape, device="meta")).shape
            if got != local_part(parameter).shape:
                raise ConfigError(
                    f"shard: on rank {rank} {name} has shape {list(local_part(parameter).shape)}, "
                    f"but its part of the reference's {list(shape)} would have shape "
                    f"{list(got)}; correct shard(name) or the model"
                )
        except ConfigError as error:
            problems += error.problems
    if problems:
        rest = len(problems) - MOST_PROBLEMS
        others = [f"and {rest} more parameters"] if rest > 0 else []
        raise ConfigError(*problems[:MOST_PROBLEMS], *others)
    return local


def check_names(
    parameters: Mapping[str, nn.Parameter], start: Mapping[str, Tensor], rank: int
) -> None:
    """Raises ConfigError if a parameter is none of the reference's."""
    unknown = [name for name in parameters if name not in start]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        known = next((name for name in start if name not in parameters), next(iter(start)))
        raise ConfigError(
            f"rename: on rank {rank} the parameter {unknown[0]}{more} has no counterpart in the "
            f"reference, which has {known}, for instance; give rename=, a function from the "
            "parallel code's name to the reference's"
        )


def _whole(whole: Tensor) -> Tensor:
    return whole


def _chunks(
    parameters: Mapping[str, nn.Parameter], start: Mapping[str, Tensor], grid: Grid, rank: int
) -> dict[str, tuple[int, list[str]]]:
    """The dimension in which a tensor is cut, and the axes that may cut it, by name.

    Of several axes with the right degree, those along which all ranks have the starting values.
    """
    found: dict[str, tuple[int, list[str]]] = {}
    equal: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        own, whole = parameter.shape, start[name].shape
        differing = [d for d in range(len(whole)) if len(own) == len(whole) and own[d] != whole[d]]
        if len(differing) != 1:
            continue
        dim, place = differing[0], grid.coordinates(rank)
        chunks = {
            axis: [Chunk(dim, place[axis], grid.degrees[axis], way) for way in (False, True)]
            for axis in grid.axes_in_use
        }
        empty = torch.empty(whole, device="meta")
        axes = [a for a, either in chunks.items() if any(c(empty).shape == own for c in either)]
        found[name] = dim, axes
        if len(axes) > 1 and not parameter.is_meta:
            values, known = parameter.detach().to(start[name]), start[name]
            equal[name] = [a for a in axes if any(torch.equal(values, c(known)) for c in chunks[a])]
    everyone = gathered(equal)
    for name, (dim, axes) in found.items():
        same = [a for a in axes if all(a in of_rank.get(name, axes) for of_rank in everyone)]
        found[name] = dim, same or axes
    return found


@dataclass(frozen=True)
class FusedCut:
    """A cut that takes some numbers of a dimension."""

    dim: int
    numbers: Tensor

    def __call__(self, whole: Tensor) -> Tensor:
        """These numbers of the reference's tensor."""
        return whole.index_select(self.dim, self.numbers)


def _fused(
    parameters: Mapping[str, nn.Parameter],
    start: Mapping[str, Tensor],
    chunks: Mapping[str, tuple[int, list[str]]],
    grid: Grid,
    rank: int,
) -> dict[str, FusedCut]:
    """The parameters whose starting values say that several matrices, stacked in one tensor, are
    cut each for itself, such as queries, keys and values.

    A bias, which may be zero everywhere, is cut as the weight of its module.
    """
    found: dict[str, FusedCut] = {}
    places = grid.coordinates(rank)
    for name, (dim, axes) in sorted(chunks.items(), key=lambda one: -start[one[0]].ndim):
        parameter = parameters[name]
        if parameter.is_meta or start[name].numel() > MOST_ELEMENTS:
            continue
        whole = start[name]
        own = parameter.detach().to(whole)
        if any(torch.equal(own, Chunk(dim, places[a], grid.degrees[a])(whole)) for a in axes):
            continue
        weight = found.get(f"{name.rpartition('.')[0]}.weight")
        if weight is not None and whole.ndim == 1 and weight.dim == 0:
            if len(weight.numbers) == len(own) and torch.equal(own, weight(whole)):
                found[name] = weight
            continue
        numbers = numbers_of(own, whole, dim)
        if any(_is_of_sections(numbers, places[axis], grid.degrees[axis]) for axis in axes):
            found[name] = FusedCut(dim, torch.tensor(numbers))
    return found


def numbers_of(own: Tensor, whole: Tensor, dim: int) -> list[int]:
    """Which slices of a tensor along a dimension another one has; none if that is not clear."""
    mine, known = (
        [digest_of(one) for one in tensor.movedim(dim, 0).contiguous()] for tensor in (own, whole)
    )
    numbers = {digest: number for number, digest in enumerate(known)}
    is_clear = len(numbers) == len(known) and set(mine) <= numbers.keys()
    return [numbers[digest] for digest in mine] if is_clear else []


def _is_of_sections(numbers: Sequence[int], index: int, count: int) -> bool:
    """Whether numbers are those of the chunk `index` of `count` of each of several sections."""
    start = before = 0
    while start < len(numbers):
        end = start + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            end += 1
        if numbers[start] != count * before + index * (end - start):
            return False
        before += end - start
        start = end
    return bool(numbers)


def _declared(name: str, given: Any, grid: Grid, rank: int) -> Cut:
    """A cut from (dim, axis), (dim, index, count), a list of these, or a function."""
    if callable(given):
        return given
    if isinstance(given, list):
        cuts = [_declared(name, each, grid, rank) for each in given]

        def all_of(whole: Tensor) -> Tensor:
            for cut in cuts:
                whole = cut(whole)
            return whole

        return all_of
    if isinstance(given, tuple) and len(given) == 2 and given[1] in grid.degrees:
        dim, axis = given
        return Chunk(dim, grid.coordinates(rank)[axis], grid.degrees[axis])
    if (
        isinstance(given, tuple)
        and len(given) == 3
        and all(isinstance(v, int) for v in given)
        and 0 <= given[1] < given[2]
    ):
        return Chunk(*given)
    axes = ", ".join(grid.degrees)
    raise ConfigError(
        f"shard: returned {given!r} for {name}; return None, (dim, axis) with an axis of {axes}, "
        "(dim, index, count), a list of these, or a function that cuts the whole tensor"
    )


@dataclass(frozen=True)
class Chunk:
    """A cut that takes the chunk `index` of `count` along a dimension.

    If there are no equal ones, they are cut as by torch.chunk, which DTensor uses, or as by
    torch.tensor_split if they are balanced.
    """

    dim: int
    index: int
    count: int
    is_balanced: bool = False

    def __call__(self, whole: Tensor) -> Tensor:
        """This chunk of the reference's tensor, which may be empty."""
        if self.dim >= whole.ndim:
            raise ConfigError(
                f"shard: a tensor of shape {list(whole.shape)} has no dimension {self.dim}; "
                "correct shard(name)"
            )
        if self.is_balanced:
            return whole.tensor_split(self.count, self.dim)[self.index]
        chunks = whole.chunk(self.count, self.dim)
        return chunks[self.index] if self.index < len(chunks) else whole.narrow(self.dim, 0, 0)
