"""Runs jobs on local ranks: a reference on one process, and plans, measured against its record.

References are kept, so that a second plan costs only its own steps.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from titanlite.config import ResolvedJob
from titanlite.errors import ConfigError, RankError, TitanliteError
from titanlite.tools.verify import on_rank
from titanlite.tools.verify.jobs import JobRun, Microbatches, microbatches_of, saving_job
from titanlite.tools.verify.pool import RankPools, must_run
from titanlite.tools.verify.record import RankRun, RankStep, ReferenceRun, ReferenceStep


@dataclass(kw_only=True)
class Reference(ReferenceRun):
    """A job that was run on one process, and the folder of its tensors."""

    job: ResolvedJob
    folder: str


class JobRuns:
    """Runs jobs on the ranks of `pools`; `folder` is for what they write."""

    def __init__(self, pools: RankPools, folder: str) -> None:
        self.pools = pools
        self._folder = folder
        self._references: dict[tuple[str, int, Microbatches | None], Reference] = {}

    def run_both(
        self, plan: JobRun, alone: ResolvedJob, *, is_beside: bool
    ) -> tuple[Reference, list[RankRun], RankError | None]:
        """Run a plan and its reference `alone`; returns the reference, and what the ranks measured.

        With `is_beside`, the plan runs beside the reference, one step behind it. If the plan
        reloads its checkpoint, one process does too. If a rank of the plan fails, there are no
        measurements, but its error. Raises ConfigError if the job itself is wrong.
        """
        job, one = plan.job, self.pools.of(1)
        with self._saving(plan) as plan, self.pools.closing_busy():
            reference_run = JobRun(alone, plan.steps, microbatches=microbatches_of(job))
            folder, wait = self._start_reference(reference_run, is_beside=is_beside)
            results = self._start(plan, folder) if is_beside else None
            reference = wait()
            try:
                results = results or self._start(plan, folder)
                waits = plan.reloads and job.dims.world_size > 1
                resumed = self._start_resume(plan, reference) if waits else None
                runs = results()
                if plan.reloads and all(run.reloaded for run in runs):
                    resumed = resumed or self._start_resume(plan, reference)
                    (runs[0].reloaded_alone,) = resumed()
            except TitanliteError as error:
                return reference, [], failure(error)
            finally:
                if one.is_busy:
                    # No checkpoint was saved.
                    one.close(now=True)
            return reference, runs, None

    def reference(self, run: JobRun) -> Reference:
        """Run a job on one process, or return the earlier run of the same job."""
        return self._start_reference(run)[1]()

    def run(self, run: JobRun, reference: Reference) -> list[RankRun]:
        """Run a job on its ranks and measure it against the reference."""
        return self._start(run, reference.folder)()

    def _start(self, run: JobRun, folder: str) -> Callable[[], list[RankRun]]:
        """Start such a run; `folder` is the reference's, which may still be running."""
        pool = self.pools.of(run.job.dims.world_size)
        return pool.submit(on_rank.run.run_plan, run, folder)

    def _start_reference(
        self, run: JobRun, *, is_beside: bool = False
    ) -> tuple[str, Callable[[], Reference]]:
        """Start a job on one process, unless it has run; its folder, and what waits for its end."""
        key = run.job.config.model_dump_json(exclude_unset=True), run.steps, run.microbatches
        if known := self._references.get(key):
            return known.folder, lambda: known
        folder = tempfile.mkdtemp(dir=self._folder)
        results = self.pools.of(1).submit(
            on_rank.run.run_reference, run, folder, is_beside=is_beside
        )

        def wait() -> Reference:
            with must_run("the job does not run"):
                (done,) = results()
            _require_finite(done.steps)
            found = Reference(**vars(done), job=run.job, folder=folder)
            self._references[key] = found
            return found

        return folder, wait

    def _start_resume(self, saved: JobRun, reference: Reference) -> Callable[[], list[RankStep]]:
        """Let one process load the checkpoint of `saved`, as soon as it is complete."""
        job = saving_job(reference.job, saved.job.config.job.dump_folder)
        return self.pools.of(1).submit(
            on_rank.reload.resume_alone, job, saved.steps, reference.folder
        )

    @contextlib.contextmanager
    def _saving(self, plan: JobRun) -> Iterator[JobRun]:
        """The run, with checkpoints in a temporary folder if it is to save one."""
        if not plan.reloads:
            yield plan
            return
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            yield replace(plan, job=saving_job(plan.job, folder))


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
