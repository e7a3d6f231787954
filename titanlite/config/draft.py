"""A job while it is checked; torch-free."""

import functools
from dataclasses import dataclass
from typing import Any

from titanlite.config.data import own_length, sequence_length
from titanlite.config.model import num_experts, size_problems
from titanlite.config.pipeline import PipelinePlan, make_pipeline_plan
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import ParallelDims


@dataclass
class Draft:
    """A job while it is checked, with the values that follow from its configuration."""

    config: JobConfig
    dims: ParallelDims
    model: Any
    """The model's own configuration; None if a mistake leaves it unknown."""

    @property
    def batch_sizes(self) -> tuple[tuple[int, int], ...]:
        """Each change of the global batch: from which step on, and to how many sequences."""
        training = self.config.training
        size = training.global_batch_size
        first = training.local_batch_size * self.dims.dp if size == -1 else size
        changes = {1: first, **dict(training.batch_size_schedule)}
        return tuple(changes.items())

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return sequence_length(self.config, self.model)

    @property
    def own_length(self) -> int | None:
        """The sequence length of the model itself; None if it takes any."""
        return own_length(self.model)

    @property
    def misfits(self) -> list[tuple[str, str]]:
        """The keys whose values do not fit the model's sizes, each with what is wrong."""
        return size_problems(self.model, self.dims, self.seq_len)

    @functools.cached_property
    def num_experts(self) -> int:
        """The experts of a block; 0 without any."""
        return num_experts(self.config, self.model)

    @property
    def pipeline(self) -> PipelinePlan | None:
        """Stages and schedule; None without a pipeline, or if it has problems."""
        return self._pipeline[0]

    @property
    def pipeline_problems(self) -> tuple[str, ...]:
        return self._pipeline[1]

    @functools.cached_property
    def _pipeline(self) -> tuple[PipelinePlan | None, tuple[str, ...]]:
        if not self.dims.pp_enabled:
            return None, ()
        try:
            return make_pipeline_plan(self.config, self.dims, self.model), ()
        except ConfigError as error:
            return None, error.problems
