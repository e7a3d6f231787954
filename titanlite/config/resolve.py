"""Resolve a job once, before any rank starts; the result is sent to the ranks.

    JobConfig + number of ranks -> resolve_job -> ResolvedJob

Training, verification, sampling and drawing all start from it. Torch-free.
"""

import pickle
from dataclasses import dataclass
from typing import Any

from titanlite import pickles
from titanlite.config.draft import Draft
from titanlite.config.load import Reading
from titanlite.config.model import import_module
from titanlite.config.pipeline import PipelinePlan
from titanlite.config.schema import JobConfig
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.registry import specs_to_send, take_sent


@dataclass(frozen=True)
class ResolvedJob:
    """A configuration, with every value that follows from it and the number of ranks."""

    config: JobConfig
    dims: ParallelDims
    """The degree of every axis, with -1 resolved."""
    model: Any
    """The model's own configuration: its flavor with the overrides of [model]."""
    seq_len: int
    """Tokens in a sequence."""
    global_batch_size: int
    """Sequences per step, over all ranks, with -1 resolved."""
    pipeline: PipelinePlan | None
    """Stages and schedule; None without pipeline parallelism."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The model's configuration may be of a user's class: a rank must import
        # experimental.custom_import before it unpickles it. What the calling script registered
        # cannot be imported, and is sent.
        specs = specs_to_send(_used(self.config), self.config.experimental.custom_import)
        rest = (specs, self.model, self.seq_len, self.global_batch_size, self.pipeline)
        return _unpack, (self.config, self.dims, pickles.dumps(rest))


def resolve_job(config: JobConfig, world_size: int | None = None) -> ResolvedJob:
    """The job for `world_size` ranks, or if that is None, for as many as its degrees need.

    Raises ConfigError with all problems.
    """
    reading = Reading(config)
    draft = reading.draft(world_size)
    reading.require()
    return finish(draft)


def finish(draft: Draft) -> ResolvedJob:
    """The resolved job of a draft that has passed every check."""
    return ResolvedJob(
        draft.config,
        draft.dims,
        draft.model,
        draft.seq_len,
        draft.global_batch_size,
        draft.pipeline,
    )


def _used(config: JobConfig) -> dict[str, tuple[str | None, ...]]:
    """The names of the registered things that a job uses, by kind."""
    return {
        "model": (config.model.name,),
        "data set": (config.training.dataset, config.validation.dataset),
        "loss": (config.training.loss,),
        "metric": config.validation.metrics,
        "optimizer": (config.optimizer.name,),
        "scheduler": (config.lr_scheduler.decay_type,),
    }


def _unpack(config: JobConfig, dims: ParallelDims, packed: bytes) -> ResolvedJob:
    if config.experimental.custom_import:
        import_module(config.experimental.custom_import)
    specs, *rest = pickle.loads(packed)
    take_sent(specs)
    return ResolvedJob(config, dims, *rest)
