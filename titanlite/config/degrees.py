"""From the degrees that a job asks for to those of a world: the meaning of -1, and what misfits."""

from __future__ import annotations

import dataclasses
import math

from titanlite.config.data import sequence_length
from titanlite.config.model import resolve_model
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError, nearest
from titanlite.mesh.parallel_dims import AXES, TABLE, ParallelDims, divisors

DEGREES = {axis.name: axis.degree_key for axis in TABLE}
"""Mesh axis -> its key in [parallelism]."""


def make_parallel_dims(
    config: JobConfig, world_size: int | None, num_gpus: int = 0
) -> ParallelDims:
    """The degree of every axis for a world of `world_size` ranks, with no -1 left.

    `world_size` None means that the job starts its own ranks, as many as the degrees need; a
    `data_parallel_shard_degree` of -1 then is 1 on CPU, and on CUDA the GPUs of this machine
    (`num_gpus`, 0 for none) that the other degrees leave. Raises ConfigError, with the nearest
    legal values, where the degrees do not make up the world.
    """
    degrees = {axis: getattr(config.parallelism, key) for axis, key in DEGREES.items()}
    rest = degrees["dp_shard"] == -1
    if rest:
        others = math.prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
        gpus = 0 if config.job.device == "cpu" else num_gpus
        degrees["dp_shard"] = max(1, (gpus if world_size is None else world_size) // others)
    dims = ParallelDims(**degrees)
    if world_size not in (None, dims.world_size):
        fixed = dataclasses.replace(dims, dp_shard=1) if rest else dims
        raise ConfigError(_misfit(config, fixed, world_size, rest))
    return dims


def _misfit(config: JobConfig, dims: ParallelDims, world_size: int | None, rest: bool) -> str:
    """The line about degrees that do not make up `world_size`; `rest`: dp_shard is -1."""
    assert world_size is not None
    needed = dims.world_size
    wrong = f"{dims.describe()} needs {'a multiple of ' if rest else ''}{needed} ranks, and there"
    wrong += f" {'is' if world_size == 1 else 'are'} {world_size}"
    if needed == 1:
        wrong = f"nothing is split, and there are {world_size} ranks"
    multiples = range(needed, (world_size + needed if rest else needed) + 1, needed)
    numbers = nearest(world_size, multiples)
    start = f"start {numbers} rank{'s' * (numbers != '1')}"
    # What a person would change first.
    order = ("dp_shard", "tp", "dp_replicate", "cp", "pp", *AXES)
    axes = [axis for axis in dict.fromkeys(order) if dims.degrees[axis] > 1]
    for axis in axes if rest else ["dp_shard", *axes]:
        room, remainder = divmod(world_size, needed // dims.degrees[axis])
        legal = divisors(room) if rest else [room]
        if axis == "tp":
            legal = [tp for tp in legal if _takes(config, dataclasses.replace(dims, tp=tp))]
        if remainder == 0 and legal:
            give = nearest(dims.degrees[axis], legal)
            if axis == "dp_shard":
                give += " (or -1, the rest)"
            key = f"parallelism.{DEGREES[axis]}"
            return f"{key}: {wrong}; give {give}, or {start}"
    return f"parallelism: {wrong}; give degrees that multiply to {world_size}, or {start}"


def _takes(config: JobConfig, dims: ParallelDims) -> bool:
    """Whether the model can be split so; a model that something is wrong with takes anything."""
    model = resolve_model(config).sizes
    return model is None or not model.problems(dims, sequence_length(config, model))
