"""The degree of every mesh axis for a number of ranks: resolves -1, explains a mismatch."""

import dataclasses
import math

from titanlite.config.data import sequence_length
from titanlite.config.model import resolve_model, size_problems
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError, nearest
from titanlite.mesh.parallel_dims import AXES, GRID, ParallelDims, divisors

DEGREES = {axis.name: axis.degree_key for axis in GRID}
"""Mesh axis -> its key in [parallelism]."""


def make_parallel_dims(
    config: JobConfig, world_size: int | None, num_gpus: int = 0
) -> ParallelDims:
    """The degree of every axis for a world of `world_size` ranks, with no -1 left.

    If `world_size` is None, the job starts its own ranks, as many as the degrees need. Then a
    `data_parallel_shard_degree` of -1 is 1 on CPU; on CUDA it is the number of GPUs of this machine
    (`num_gpus`) divided by the other degrees. Raises ConfigError, with the nearest legal values, if
    the degrees do not multiply to `world_size`.
    """
    degrees = {axis: getattr(config.parallelism, key) for axis, key in DEGREES.items()}
    rest = degrees["dp_shard"] == -1
    if rest:
        others = math.prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
        gpus = 0 if config.job.device == "cpu" else num_gpus
        degrees["dp_shard"] = max(1, (gpus if world_size is None else world_size) // others)
    dims = ParallelDims(**degrees, ep=config.parallelism.expert_parallel_degree)
    if world_size not in (None, dims.world_size):
        fixed = dataclasses.replace(dims, dp_shard=1) if rest else dims
        raise ConfigError(_misfit(config, fixed, world_size, rest))
    return dims


def _misfit(config: JobConfig, dims: ParallelDims, world_size: int | None, rest: bool) -> str:
    """The message for degrees that do not multiply to `world_size`; `rest`: dp_shard is -1."""
    assert world_size is not None
    needed = dims.world_size
    wrong = f"{dims.describe()} needs {'a multiple of ' if rest else ''}{needed} ranks, but there"
    wrong += f" {'is' if world_size == 1 else 'are'} {world_size}"
    if needed == 1:
        wrong = f"every degree is 1, but there are {world_size} ranks"
    multiples = range(needed, (world_size + needed if rest else needed) + 1, needed)
    numbers = nearest(world_size, multiples)
    start = f"start {numbers} rank{'s' * (numbers != '1')}"
    # The axes in the order in which a user would change them.
    order = ("dp_shard", "tp", "dp_replicate", "cp", "pp", *AXES)
    axes = [axis for axis in dict.fromkeys(order) if dims.degrees[axis] > 1]
    for axis in axes if rest else ["dp_shard", *axes]:
        room, remainder = divmod(world_size, needed // dims.degrees[axis])
        if remainder:
            continue
        legal = divisors(room) if rest else [room]
        if axis == "tp":
            legal = [tp for tp in legal if _takes(config, dataclasses.replace(dims, tp=tp))]
        if legal:
            give = nearest(dims.degrees[axis], legal)
            if axis == "dp_shard":
                give += " (or -1 for the remaining ranks)"
            key = f"parallelism.{DEGREES[axis]}"
            return f"{key}: {wrong}; give {give}, or {start}"
    return f"parallelism: {wrong}; give degrees that multiply to {world_size}, or {start}"


def _takes(config: JobConfig, dims: ParallelDims) -> bool:
    """Whether the model can be sharded with these degrees; True if its sizes are not known."""
    model = resolve_model(config).sizes
    return model is None or not size_problems(model, dims, sequence_length(config, model))
