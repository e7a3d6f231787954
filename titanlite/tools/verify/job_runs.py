"""Runs jobs on local ranks: a reference on one process, and plans, measured against its record.

References are kept, so that a second plan costs only its own steps.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlite.config import ResolvedJob
from titanlite.errors import ConfigError, RankError, TitanliteError
from titanlite.tools.verify.jobs import Microbatches, Patch, microbatches_of, saving_job
from titanlite.tools.verify.pool import RankPools, must_run
from titanlite.tools.verify.record import RankRun, RankStep, ReferenceRun, ReferenceStep

if TYPE_CHECKING:
    from titanlite.ranks.world import World


@dataclass
class Reference:
    """A job that was run on one process: the numbers of each step, and the folder of its tensors.

    The first of `steps` is the start.
    """

    job: ResolvedJob
    folder: str
    steps: list[ReferenceStep]
    narrowed: tuple[str, ...] = ()
    """Modules that compute in a narrower dtype than that of their input."""
    problems: tuple[str, ...] = ()
    """Sentences about where its step does not follow the formulas."""


class JobRuns:
    """Runs jobs on the ranks of `pools`; `folder` is for what they write."""

    def __init__(self, pools: RankPools, folder: str) -> None:
        self.pools = pools
        self._folder = folder
        self._references: dict[tuple[str, int, Microbatches | None], Reference] = {}

    def run_both(
        self,
        plan: ResolvedJob,
        alone: ResolvedJob,
        steps: int,
        patch: Patch | None,
        *,
        is_beside: bool,
        reloads: bool,
        replay: bool,
    ) -> tuple[Reference, list[RankRun], RankError | None]:
        """Run `plan` and its reference `alone`; returns the reference, and what the ranks measured.

        With `is_beside`, the plan runs beside the reference, one step behind it. With `reloads`,
        the plan saves a checkpoint, which one process loads too. If a rank of the plan fails, there
        are no measurements, but its error. Raises ConfigError if the job itself is wrong.
        """
        ranks, one = self.pools.of(plan.dims.world_size), self.pools.of(1)
        with self._saving(plan, reloads) as job, self.pools.closing_busy():
            folder, wait = self._start_reference(
                alone, steps, microbatches_of(plan), is_beside=is_beside
            )

            def start_plan() -> Callable[[], list[RankRun]]:
                return self._start(job, folder, steps, patch, reloads=reloads, replay=replay)

            results = start_plan() if is_beside else None
            reference = wait()
            try:
                results = results or start_plan()
                waits = reloads and ranks is not one
                resumed = self._start_resume(job, reference, steps) if waits else None
                runs = results()
                if reloads and all(run.reloaded for run in runs):
                    resumed = resumed or self._start_resume(job, reference, steps)
                    (runs[0].reloaded_alone,) = resumed()
            except TitanliteError as error:
                return reference, [], failure(error)
            finally:
                if one.is_busy:
                    # No checkpoint was saved.
                    one.close(now=True)
            return reference, runs, None

    def reference(
        self, alone: ResolvedJob, steps: int, microbatches: Microbatches | None = None
    ) -> Reference:
        """Run a job on one process, or return the earlier run of the same job."""
        return self._start_reference(alone, steps, microbatches)[1]()

    def run(
        self,
        job: ResolvedJob,
        reference: Reference,
        steps: int,
        patch: Patch | None = None,
        microbatches: Microbatches | None = None,
        *,
        replay: bool = False,
    ) -> list[RankRun]:
        """Run a job on its ranks for `steps` steps and measure it against the reference."""
        return self._start(job, reference.folder, steps, patch, microbatches, replay=replay)()

    def _start(
        self,
        job: ResolvedJob,
        folder: str,
        steps: int,
        patch: Patch | None = None,
        microbatches: Microbatches | None = None,
        *,
        reloads: bool = False,
        replay: bool = False,
    ) -> Callable[[], list[RankRun]]:
        """Start such a run; `folder` is the reference's, which may still be running."""

        def on_rank(world: World) -> RankRun:
            from titanlite.tools.verify.run import run_plan

            return run_plan(
                world, job, steps, folder, patch, microbatches, reloads=reloads, replay=replay
            )

        return self.pools.of(job.dims.world_size).submit(on_rank)

    def _start_reference(
        self,
        alone: ResolvedJob,
        steps: int,
        microbatches: Microbatches | None,
        *,
        is_beside: bool = False,
    ) -> tuple[str, Callable[[], Reference]]:
        """Start a job on one process, unless it was run before.

        Returns its folder, in which each step's record appears, and a function that waits for its
        end.
        """
        key = alone.config.model_dump_json(exclude_unset=True), steps, microbatches
        if known := self._references.get(key):
            return known.folder, lambda: known
        folder = tempfile.mkdtemp(dir=self._folder)

        def on_rank(world: World) -> ReferenceRun:
            from titanlite.tools.verify.run import run_reference

            return run_reference(world, alone, steps, folder, microbatches, is_beside=is_beside)

        results = self.pools.of(1).submit(on_rank)

        def wait() -> Reference:
            with must_run("the job does not run"):
                (run,) = results()
            _require_finite(run.steps)
            found = Reference(alone, folder, run.steps, run.narrowed, run.problems)
            self._references[key] = found
            return found

        return folder, wait

    def _start_resume(
        self, saved: ResolvedJob, reference: Reference, step: int
    ) -> Callable[[], list[RankStep]]:
        """Let one process load the checkpoint of `saved`, as soon as it is complete."""
        job = saving_job(reference.job, saved.config.job.dump_folder)

        def on_rank(world: World) -> RankStep:
            from titanlite.tools.verify.reload import resume_alone

            return resume_alone(world, job, step, reference.folder)

        return self.pools.of(1).submit(on_rank)

    @contextlib.contextmanager
    def _saving(self, plan: ResolvedJob, reloads: bool) -> Iterator[ResolvedJob]:
        """The job, with checkpoints in a temporary folder if it is to save one."""
        if not reloads:
            yield plan
            return
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            yield saving_job(plan, folder)


def failure(error: TitanliteError) -> RankError:
    """What a plan's rank failed with; raises a ConfigError again: the job itself is wrong."""
    if isinstance(error, ConfigError):
        raise error
    return error if isinstance(error, RankError) else RankError(error.rank or 0, str(error))


def _require_finite(reference: Sequence[ReferenceStep]) -> None:
    for step, numbers in enumerate(reference):
        for words, value in (("loss", numbers.loss), ("gradient norm", numbers.norm)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"model.name: on one process the {words} of step {step} is {value}, which "
                    "cannot be compared; give a lower optimizer.lr, fewer --steps or another model"
                )
