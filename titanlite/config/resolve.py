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
    batch_sizes: tuple[tuple[int, int], ...]
    """Each change of the global batch, with -1 resolved: (from which step on, sequences)."""
    pipeline: PipelinePlan | None
    """Stages and schedule; None without pipeline parallelism."""

    @property
    def global_batch_size(self) -> int:
        """Sequences per step, over all ranks; if they change, those of the largest step."""
        return max(size for _, size in self.batch_sizes)

    def num_sequences(self, first: int, last: int) -> int:
        """The sequences that the steps `first` to `last` read together, over all ranks."""
        stops = [*(start for start, _ in self.batch_sizes[1:]), last + 1]
        return sum(
            size * max(0, min(stop, last + 1) - max(start, first))
            for (start, size), stop in zip(self.batch_sizes, stops, strict=True)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The model's configuration may be of a user's class: a rank must import
        # experimental.custom_import before it unpickles it. What the calling script registered
        # cannot be imported, and is sent.
        specs = specs_to_send(_used(self.config), self.config.experimental.custom_import)
        rest = (specs, self.model, self.seq_len, self.batch_sizes, self.pipeline)
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
        draft.config, draft.dims, draft.model, draft.seq_len, draft.batch_sizes, draft.pipeline
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
