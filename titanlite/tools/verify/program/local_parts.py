"""On a rank: which part of each of the reference's tensors it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import Grid
from titanlite.modules.shards import local_part
from titanlite.tools.verify.subject import Cut, LocalPart

MOST_PROBLEMS = 4


def find_parts(
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, torch.Size],
    declared: Callable[[str], Any] | None,
    grid: Grid,
    rank: int,
) -> dict[str, LocalPart]:
    """The parts that this rank holds; raises ConfigError for names and shapes that do not fit."""
    unknown = [name for name in parameters if name not in shapes]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        known = next((name for name in shapes if name not in parameters), next(iter(shapes)))
        raise ConfigError(
            f"rename: on rank {rank} the parameter {unknown[0]}{more} has no counterpart in the "
            f"reference, which has {known}, for instance; give rename=, a function from the "
            "parallel code's name to the reference's"
        )
    local: dict[str, LocalPart] = {}
    problems: list[str] = []
    for name, parameter in parameters.items():
        try:
            cut = _cut_of(name, parameter, shapes[name], declared, grid, rank)
            local[name] = LocalPart(shapes[name], parameter, cut)
            got = local[name].part_of(torch.empty(shapes[name], device="meta")).shape
            if got != local_part(parameter).shape:
                raise ConfigError(
                    f"shard: on rank {rank} {name} has shape {list(local_part(parameter).shape)}, "
                    f"but its part of the reference's {list(shapes[name])} would have shape "
                    f"{list(got)}; correct shard(name) or the model"
                )
        except ConfigError as error:
            problems += error.problems
    if problems:
        rest = len(problems) - MOST_PROBLEMS
        others = [f"and {rest} more parameters"] if rest > 0 else []
        raise ConfigError(*problems[:MOST_PROBLEMS], *others)
    return local


def _cut_of(
    name: str,
    parameter: Tensor,
    shape: torch.Size,
    declared: Callable[[str], Any] | None,
    grid: Grid,
    rank: int,
) -> Cut:
    given = declared(name) if declared is not None else None
    if given is not None:
        return _declared(name, given, grid, rank)
    if parameter.shape == shape:
        return lambda whole: whole
    return _inferred(name, parameter.shape, shape, grid, rank)


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
        return _chunk(dim, grid.coordinates(rank)[axis], grid.degrees[axis])
    if (
        isinstance(given, tuple)
        and len(given) == 3
        and all(isinstance(v, int) for v in given)
        and 0 <= given[1] < given[2]
    ):
        return _chunk(*given)
    axes = ", ".join(grid.degrees)
    raise ConfigError(
        f"shard: returned {given!r} for {name}; return None, (dim, axis) with an axis of {axes}, "
        "(dim, index, count), a list of these, or a function that cuts the whole tensor"
    )


def _chunk(dim: int, index: int, count: int) -> Cut:
    def cut(whole: Tensor) -> Tensor:
        if dim >= whole.ndim or whole.size(dim) % count:
            raise ConfigError(
                f"shard: dimension {dim} of {list(whole.shape)} has no {count} equal parts; "
                "correct shard(name)"
            )
        return whole.chunk(count, dim)[index]

    return cut


def _inferred(name: str, own: torch.Size, whole: torch.Size, grid: Grid, rank: int) -> Cut:
    """The chunk along the only axis whose degree is the quotient of the two shapes."""
    differing = [d for d in range(len(whole)) if len(own) == len(whole) and own[d] != whole[d]]
    if len(differing) == 1:
        dim = differing[0]
        fitting = [a for a in grid.axes_in_use if own[dim] * grid.degrees[a] == whole[dim]]
        if len(fitting) == 1:
            axis = fitting[0]
            return _chunk(dim, grid.coordinates(rank)[axis], grid.degrees[axis])
    raise ConfigError(
        f"shard: on rank {rank} {name} has shape {list(own)}, the reference's {list(whole)}, and "
        "no single axis explains that; give shard=, a function from a name to (dim, axis)"
    )
