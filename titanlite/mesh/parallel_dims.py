"""The mesh axes, their meaning, and the coordinates of each rank; torch-free.

The ranks of a job form a grid with one axis per kind of parallelism. TABLE lists what the ranks
along an axis share and what they split. Which data a rank reads, whose loss counts, and over which
axes weights are sharded or replicated all follow from it.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Axis:
    """One mesh axis: how the ranks along it divide the batch and the weights.

    `batch`: each rank has different samples ("samples"), different tokens of the same samples
    ("tokens"), or the same tokens ("same"). `weights`: each rank has all of them ("replicated"),
    shards that FSDP2 all-gathers ("sharded"), shards by the model's tensor-parallel plan ("cut"),
    or different modules ("stages"). `degree_key` is the axis' key in [parallelism]. `label`,
    `letter` and `color` (#rrggbb) show it in tables and pictures.

    An axis with `borrows` has no ranks of its own: it divides the ranks of these axes in another
    way, for the parameters of experts only. Its ranks hold different experts, and receive the
    tokens that are routed to them.
    """

    name: str
    degree_key: str
    batch: Literal["samples", "tokens", "same", "routed"]
    weights: Literal["replicated", "sharded", "cut", "stages", "experts"]
    label: str
    letter: str
    color: str
    borrows: tuple[str, ...] = ()


# Outermost first. Ranks are numbered in row-major order, so the ranks of the innermost axis, which
# communicates most, are adjacent.
TABLE = (
    Axis("pp", "pipeline_parallel_degree", "same", "stages", "PP", "P", "#8c510a"),
    Axis(
        *("dp_replicate", "data_parallel_replicate_degree", "samples", "replicated"),
        *("DDP", "R", "#b35806"),
    ),
    Axis("dp_shard", "data_parallel_shard_degree", "samples", "sharded", "FSDP", "S", "#e69f00"),
    Axis("cp", "context_parallel_degree", "tokens", "sharded", "CP", "C", "#cc79a7"),
    Axis("tp", "tensor_parallel_degree", "same", "cut", "TP", "T", "#d55e00"),
    # It takes the ranks of tp first, then those of cp, then those of dp_shard.
    Axis(
        *("ep", "expert_parallel_degree", "routed", "experts", "EP", "E", "#762a83"),
        borrows=("dp_shard", "cp", "tp"),
    ),
)
GRID = tuple(axis for axis in TABLE if not axis.borrows)
"""The axes whose degrees multiply to the number of ranks, outermost first."""
AXES = tuple(axis.name for axis in GRID)
"""The names of the axes of GRID."""
EXPERT_SHARDS = "efsdp"
"""The mesh dimension over which FSDP2 shards experts: the borrowed ranks that ep leaves."""


@functools.cache
def axes_where(*, batch: str | None = None, weights: str | None = None) -> tuple[str, ...]:
    """The axes of one kind, outermost first: axes_where(weights="sharded"), for example."""
    return tuple(
        axis.name
        for axis in GRID
        if batch in (None, axis.batch) and weights in (None, axis.weights)
    )


def flat_name(axes: tuple[str, ...]) -> str:
    """The name of the mesh dimension made by flattening `axes`: "dp_shard_cp"."""
    return "_".join(axes)


@functools.cache
def flattened() -> dict[str, tuple[str, ...]]:
    """The mesh dimensions made by flattening axes of one kind: name -> its axes."""
    return {
        flat_name(axes): axes
        for kind in (axes_where(weights="sharded"), axes_where(weights="replicated"))
        for count in range(2, len(kind) + 1)
        for axes in itertools.combinations(kind, count)
    }


@functools.cache
def axes_of(mesh_dim_name: str) -> tuple[str, ...]:
    """The axes of a mesh dimension: itself, or those flattened into it.

    The mesh of experts has the dimensions ep and efsdp. Together they are the axes that ep borrows,
    and experts are sharded over both.
    """
    for axis in TABLE:
        if axis.borrows and mesh_dim_name in (axis.name, EXPERT_SHARDS):
            return axis.borrows
    return flattened().get(mesh_dim_name, (mesh_dim_name,))


class Grid:
    """Ranks on named axes, outermost first, in row-major order: `Grid(pp=2, tp=4)`.

    Raises ValueError for a degree below 1.
    """

    def __init__(self, **degrees: int) -> None:
        self._degrees = degrees
        for axis, degree in degrees.items():
            if degree < 1:
                raise ValueError(f"degree of {axis} is {degree}, not at least 1")

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> its number of ranks."""
        return self._degrees

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def axes_in_use(self) -> tuple[str, ...]:
        """The axes with more than one rank."""
        return tuple(axis for axis, degree in self.degrees.items() if degree > 1)

    def degree_of(self, axes: tuple[str, ...]) -> int:
        """The product of the degrees of `axes`."""
        return math.prod(self.degrees[axis] for axis in axes)

    def place_on(self, axes: tuple[str, ...], rank: int) -> int:
        """The index of `rank` among the ranks of `axes` taken together, in row-major order."""
        position, place = self.coordinates(rank), 0
        for axis in axes:
            place = place * self.degrees[axis] + position[axis]
        return place

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> coordinate of `rank`; raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        position = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, position[axis] = divmod(rank, degree)
        return {axis: position[axis] for axis in self.degrees}

    def rank(self, **coordinates: int) -> int:
        """The rank at `coordinates` (axis=position, default 0); the inverse of coordinates().

        Raises ValueError for an unknown axis or a position outside its axis.
        """
        unknown = sorted(coordinates.keys() - self.degrees.keys())
        if unknown:
            known = ", ".join(self.degrees)
            raise ValueError(f"no mesh axis {unknown[0]!r}; the axes are {known}")
        rank = 0
        for axis, degree in self.degrees.items():
            position = coordinates.get(axis, 0)
            if not 0 <= position < degree:
                raise ValueError(f"position {position} is outside {axis}, whose degree is {degree}")
            rank = rank * degree + position
        return rank

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` on these axes only, in order."""
        here, degrees = self.coordinates(rank), self.degrees
        along = [range(n) if axis in axes else (here[axis],) for axis, n in degrees.items()]
        return [
            self.rank(**dict(zip(degrees, at, strict=True))) for at in itertools.product(*along)
        ]

    def describe_place(self, rank: int) -> str:
        """The coordinates of `rank` on the axes in use: "dp_shard 1, tp 0"; "" for one rank."""
        places = self.coordinates(rank).items()
        return ", ".join(f"{axis} {at}" for axis, at in places if self.degrees[axis] > 1)

    def describe(self) -> str:
        """The axes in use and their degrees: "dp_shard 2 x tp 2"; "one rank" if there are none."""
        used = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        return " x ".join(used) or "one rank"


@dataclass(frozen=True)
class ParallelDims(Grid):
    """The degree of every mesh axis, each at least 1; their product is the number of ranks.

    titanlite.mesh.parallel_dims.TABLE says how the ranks of each axis divide the batch and the
    weights. `ep` uses ranks of other axes and does not count in the product.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        Grid(**self.degrees, ep=self.ep)  # checks them

    @property
    def degrees(self) -> dict[str, int]:
        """The mesh axes and their degrees, outermost first; without `ep`."""
        return {axis: getattr(self, axis) for axis in AXES}

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
    def ep_enabled(self) -> bool:
        return self.ep > 1

    @property
    def dp(self) -> int:
        """The number of ranks, or groups of ranks, that read different samples."""
        return self.degree_of(axes_where(batch="samples"))

    @property
    def fsdp_enabled(self) -> bool:
        """Whether FSDP2 shards the weights, over any axis."""
        return self.num_weight_shards > 1

    @property
    def num_expert_ranks(self) -> int:
        """The number of ranks that hold one replica's experts: dp_shard x cp x tp = ep x efsdp."""
        return self.degree_of(next(axis.borrows for axis in TABLE if axis.borrows))

    @property
    def num_expert_shards(self) -> int:
        """The number of ranks over which FSDP2 shards each expert."""
        return self.num_expert_ranks // self.ep

    def uses_fsdp(self, *, is_plain: bool, has_experts: bool) -> bool:
        """Whether FSDP2 wraps the model. Otherwise DDP does, if there are several replicas.

        A job `is_plain` if it has neither mixed precision nor CPU offload. FSDP2 is used if weights
        have more than one shard. With one shard, it is used in any of three cases: the job is not
        plain, experts have shards of their own, or there are replicas together with tensor or
        pipeline parallelism. (DDP must know which backward pass of a step is the last, and a
        pipeline schedule cannot tell it.)
        """
        if not is_plain or self.fsdp_enabled:
            return True
        if not (self.tp_enabled or self.pp_enabled):
            return False
        return self.dp > 1 or (self.experts_are_apart(has_experts) and self.num_expert_shards > 1)

    def experts_are_apart(self, has_experts: bool) -> bool:
        """Whether experts have a mesh of their own: under EP, and under TP even without EP.

        TP does not shard experts, so FSDP2 shards them over the ranks of tp too.
        """
        return has_experts and (self.ep_enabled or self.tp_enabled)

    @property
    def num_weight_shards(self) -> int:
        """The number of ranks over which FSDP2 shards the weights."""
        return self.degree_of(axes_where(weights="sharded"))

    @property
    def num_replicas(self) -> int:
        """The number of copies of the weights, each sharded or cut in the same way."""
        return self.degree_of(axes_where(weights="replicated"))

    @property
    def replica_dim(self) -> str:
        """The name of the mesh dimension over which they are replicated."""
        axes = axes_where(weights="replicated")
        return flat_name(tuple(axis for axis in axes if self.degrees[axis] > 1) or axes[:1])

    @property
    def num_token_shards(self) -> int:
        """The number of ranks over which the tokens of a sample are sharded."""
        return self.degree_of(axes_where(batch="tokens"))

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """The axes in use whose ranks read different samples."""
        return tuple(axis for axis in self.axes_in_use if axis in axes_where(batch="samples"))

    def data_rank(self, rank: int) -> int:
        """The index, from 0, of the part that `rank` reads; the samples are cut into `dp` parts."""
        return self.place_on(axes_where(batch="samples"), rank)

    def token_rank(self, rank: int) -> int:
        """The index, from 0, of the part of each sequence that `rank` holds."""
        return self.place_on(axes_where(batch="tokens"), rank)

    def counts_loss(self, rank: int) -> bool:
        """Whether the loss of `rank` is counted: that of one of the ranks with the same tokens.

        It does not depend on the pp coordinate, although only the last stage computes a loss.
        """
        position = self.coordinates(rank)
        same = set(axes_where(batch="same")) - set(axes_where(weights="stages"))
        return all(position[axis] == 0 for axis in same)


def expert_shard_dim(num_experts: int, num_ranks: int) -> int:
    """How FSDP2 shards a rank's stacked experts: by expert (0), or by rows (1) if some had none."""
    each = -(-num_experts // num_ranks)
    return 0 if -(-num_experts // each) == num_ranks else 1


def divisors(number: int) -> list[int]:
    """Every divisor of `number`, ascending: the degrees that split it evenly."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
