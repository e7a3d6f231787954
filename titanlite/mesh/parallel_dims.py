"""The mesh axes, what each of them means, and where a rank stands on them; torch-free.

A job's ranks form a grid with one axis for each kind of parallelism. What the ranks along an axis
share and what they split stands in one table, AXES; who reads which data, who counts the loss and
over which ranks weights are sharded or replicated follow from it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Axis:
    """One mesh axis: what the ranks along it do with a batch and with the weights.

    `batch`: each reads other samples ("samples"), holds other tokens of the same samples
    ("tokens"), or holds the same tokens ("same"). `weights`: all of them ("replicated"), shards
    that FSDP2 gathers ("sharded"), parts that the model's plan cuts ("cut"), or other modules
    ("stages"). `degree_key` is its key in [parallelism].
    """

    name: str
    degree_key: str
    batch: Literal["samples", "tokens", "same"]
    weights: Literal["replicated", "sharded", "cut", "stages"]


# Outermost first. Ranks are numbered row by row: the innermost axis, which talks most, has
# neighbouring ranks.
TABLE = (
    Axis("pp", "pipeline_parallel_degree", batch="same", weights="stages"),
    Axis("dp_replicate", "data_parallel_replicate_degree", batch="samples", weights="replicated"),
    Axis("dp_shard", "data_parallel_shard_degree", batch="samples", weights="sharded"),
    Axis("cp", "context_parallel_degree", batch="tokens", weights="sharded"),
    Axis("tp", "tensor_parallel_degree", batch="same", weights="cut"),
)
AXES = tuple(axis.name for axis in TABLE)
"""The names of the mesh axes, outermost first."""


def axes_where(*, batch: str | None = None, weights: str | None = None) -> tuple[str, ...]:
    """The axes of one kind, outermost first, such as those over which weights are sharded."""
    return tuple(
        axis.name
        for axis in TABLE
        if batch in (None, axis.batch) and weights in (None, axis.weights)
    )


def flat_name(axes: tuple[str, ...]) -> str:
    """What a mesh dimension is called that several axes are flattened into: "dp_shard_cp"."""
    return "_".join(axes)


def axes_of(mesh_dim_name: str) -> tuple[str, ...]:
    """The axes that a mesh dimension stands for: itself, or those flattened into it."""
    sharded = axes_where(weights="sharded")
    for count in range(2, len(sharded) + 1):
        for axes in itertools.combinations(sharded, count):
            if mesh_dim_name == flat_name(axes):
                return axes
    return (mesh_dim_name,)


@dataclass(frozen=True)
class ParallelDims:
    """The degree of every mesh axis, each at least 1; their product is the number of ranks.

    A field for each row of TABLE.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees.items():
            if degree < 1:
                raise ValueError(f"degree of {axis} is {degree}, not at least 1")

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> degree, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """Number of ranks, or groups of ranks, that read different samples."""
        return self.degree_of(axes_where(batch="samples"))

    @property
    def pp_enabled(self) -> bool:
        return self.pp > 1

    @property
    def cp_enabled(self) -> bool:
        return self.cp > 1

    @property
    def tp_enabled(self) -> bool:
        return self.tp > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether weights are sharded: over all axes of that kind together."""
        return self.num_weight_shards > 1

    @property
    def num_weight_shards(self) -> int:
        """Ranks that share one set of weights, gathered by FSDP2."""
        return self.degree_of(axes_where(weights="sharded"))

    @property
    def num_token_shards(self) -> int:
        """Ranks that share the tokens of one sample."""
        return self.degree_of(axes_where(batch="tokens"))

    @property
    def axes_in_use(self) -> tuple[str, ...]:
        """The axes of more than one rank."""
        return tuple(axis for axis in AXES if self.degrees[axis] > 1)

    def degree_of(self, axes: tuple[str, ...]) -> int:
        """Ranks of some axes together."""
        return math.prod(self.degrees[axis] for axis in axes)

    def place_on(self, axes: tuple[str, ...], rank: int) -> int:
        """Where `rank` stands among the ranks of some axes together, counted row by row."""
        position, place = self.coordinates(rank), 0
        for axis in axes:
            place = place * self.degrees[axis] + position[axis]
        return place

    def data_rank(self, rank: int) -> int:
        """Which share of the samples `rank` reads, of `dp`."""
        return self.place_on(axes_where(batch="samples"), rank)

    def token_rank(self, rank: int) -> int:
        """Which share of each sample's tokens `rank` holds, of `num_token_shards`."""
        return self.place_on(axes_where(batch="tokens"), rank)

    def counts_loss(self, rank: int) -> bool:
        """Whether a loss that `rank` has computed counts: one of those that hold the same tokens.

        Of the stages of a pipeline it is the last that computes it.
        """
        position = self.coordinates(rank)
        same = set(axes_where(batch="same")) - set(axes_where(weights="stages"))
        return all(position[axis] == 0 for axis in same)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> position of `rank` on it; raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.degrees[axis])
        return {axis: position[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at `coordinates` (axis=position, 0 where left out), inverse of coordinates().

        Raises ValueError for an unknown axis or a position outside its axis.
        """
        unknown = sorted(set(coordinates) - set(AXES))
        if unknown:
            raise ValueError(f"no mesh axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
        rank = 0
        for axis, degree in self.degrees.items():
            position = coordinates.get(axis, 0)
            if not 0 <= position < degree:
                raise ValueError(f"position {position} is outside {axis}, whose degree is {degree}")
            rank = rank * degree + position
        return rank

    def describe_place(self, rank: int) -> str:
        """Where `rank` is on the axes in use, such as "dp_shard 1, tp 0"; "" without any."""
        places = self.coordinates(rank).items()
        return ", ".join(f"{axis} {at}" for axis, at in places if self.degrees[axis] > 1)

    def describe(self) -> str:
        """The axes in use, such as "dp_shard 2 x tp 2"; "one rank" where there is none."""
        used = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        return " x ".join(used) or "one rank"


def divisors(number: int) -> list[int]:
    """Every divisor of `number`, ascending: the degrees that split it evenly."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
