"""Verifies one job: trains it on one process and under its plan, and compares every step.

    with Verifier() as verifier:
        verification = verifier.verify(config, steps=5)
        assert verification.agrees, verification.cause

Ranks and references are kept, so that a second plan costs only its own steps.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from titanlite.config import JobConfig, ResolvedJob, check_machine, resolve_job
from titanlite.parallelize.steps import depends_on_microbatch, features_on
from titanlite.tools.verify import on_rank
from titanlite.tools.verify.accumulation import Accumulation, measure_rounding
from titanlite.tools.verify.causes import explain_error, find_causes
from titanlite.tools.verify.differences import Tolerance, differences, unequal_replicas
from titanlite.tools.verify.experts import moved_tokens
from titanlite.tools.verify.job_runs import JobRuns, Reference
from titanlite.tools.verify.jobs import JobRun, Patch, plan_job, reference_job
from titanlite.tools.verify.pool import RankPool, RankPools
from titanlite.tools.verify.record import RankRun
from titanlite.tools.verify.result import Verification
from titanlite.tools.verify.sensitivity import SENSITIVITY, Given, Sensitivity
from titanlite.tools.verify.wording import name_ranks


class Verifier(contextlib.AbstractContextManager["Verifier"]):
    """Verifies jobs on local ranks; leaving the context manager ends the ranks."""

    def __init__(
        self,
        device_type: str = "cpu",
        *,
        timeout_seconds: float = 300,
        max_ranks: int | None = None,
        threads: bool | None = False,
    ) -> None:
        self._exits = contextlib.ExitStack()
        folder = self._exits.enter_context(tempfile.TemporaryDirectory(prefix="titanlite-verify-"))
        pools = RankPools(
            device_type, timeout_seconds=timeout_seconds, max_ranks=max_ranks, threads=threads
        )
        self._runs = JobRuns(self._exits.enter_context(pools), folder)
        self._accumulation = Accumulation(self._runs)

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def pool(self, num_ranks: int) -> RankPool:
        """The pool of `num_ranks` ranks; it starts them at its first call."""
        return self._runs.pools.of(num_ranks)

    def verify(
        self,
        job: JobConfig | ResolvedJob,
        *,
        steps: int = 5,
        dtype: str = "float64",
        patch: Patch | None = None,
        reloads: bool = False,
        replay: bool = False,
        tolerance: float | str | None = None,
        on_start: Callable[[Verification], None] = lambda _: None,
    ) -> Verification:
        """Run `job` under its plan and on one process for `steps` steps, and compare.

        `patch` is entered on the plan's ranks only. With `reloads`, the plan saves a checkpoint
        after its last step, and a new job that has loaded it is compared too. With `replay`, every
        token goes to the experts to which the reference routed it, so that experts can be compared
        in float32 and bfloat16. `tolerance` is the largest difference that counts as agreement, or
        "sensitivity" (sensitivity.py); by default it is as differences.py says. `on_start` is
        called once the job has been checked, before it runs.
        Raises ConfigError if the job cannot be built or compared, and TitanliteError if it does not
        run on one process; an exception of a plan's rank is part of the result.
        """
        start = time.perf_counter()
        if isinstance(job, JobConfig):
            job = resolve_job(job)
        plan = plan_job(job, dtype)
        alone = reference_job(plan)
        parts = plan.global_batch_size // alone.config.training.local_batch_size
        found = Verification(plan, dtype, steps, parts, given=tolerance)
        pool = self.pool(plan.dims.world_size)
        found.threads, found.device_type = pool.are_threads, pool.device_type
        check_machine(plan.config, pool.device_type)
        on_start(found)
        # The ranks start while the reference runs.
        self.pool(plan.dims.world_size).start()
        if parts > 1:
            # Plan and reference both accumulate, so a bug in that would be in both.
            found.wrong_sums = self._accumulation.problem(plan, steps)
        run = JobRun(plan, steps, patch, reloads=reloads, replay=replay)
        is_beside = parts == 1 and plan.dims.world_size > 1
        reference, runs, found.error = self._runs.run_both(run, alone, is_beside=is_beside)
        found.narrowed = reference.narrowed
        if found.error is not None:
            found.findings = explain_error(self._runs, found, reference, patch)
        else:
            found.replays = replay
            self._judge(found, runs, reference)
            found.problems += self._wrong_formats(job, plan, patch)
            if not found.agrees and dtype == "float64":
                found.findings = self._explain(found, runs, reference, patch)
            elif not found.agrees:
                # Only in float64 can patterns be distinguished from rounding error.
                exact = self.verify(job, steps=steps, patch=patch)
                found.findings = found.problems + exact.findings + found.resume_problems or [
                    f"in float64 the plan agrees: in {dtype} its rounding error is larger than on "
                    "one process. Look at the dtypes of sums, reductions and communication"
                ]
        found.seconds = time.perf_counter() - start
        return found

    def _judge(self, found: Verification, runs: Sequence[RankRun], reference: Reference) -> None:
        """Compare what the ranks measured with the tolerances."""
        is_narrow = bool(reference.narrowed)
        config = found.job.config
        asked = [f.loss_tolerance for f in features_on(config) if f.loss_tolerance is not None]
        least = max(asked, default=None)
        is_measured = found.given == SENSITIVITY
        found.differences = differences(runs, reference.steps, by_distance=is_measured)
        found.moved = moved_tokens(runs)
        found.judge(Tolerance(found.dtype, is_narrow=is_narrow, loss_tolerance=least))
        is_exact = found.dtype == "float64"
        if found.failures or not is_exact:
            found.wrong_sums = self._accumulation.problem(found.job, found.num_steps)
        # Some tensors have larger rounding errors. Measuring them costs runs, so in float64 it is
        # done only if something is above the default tolerance.
        is_stable = not depends_on_microbatch(config)
        if is_measured:
            rounding = measure_rounding(self._runs, found, reference, perturbs=True)
            found.judge(Sensitivity(found.dtype, rounding, is_narrow, least))
        elif isinstance(found.given, float):
            found.judge(Given(dtype=found.dtype, limit=found.given))
        elif not is_exact or (found.failures and not found.wrong_sums and is_stable):
            rounding = measure_rounding(self._runs, found, reference)
            found.judge(Tolerance(found.dtype, rounding, is_narrow, least))
        found.splits = unequal_replicas(runs)
        found.problems = _merged(runs, lambda run: run.problems)
        found.problems += [p for p in reference.problems if p not in found.problems]
        found.resume_problems = _merged(runs, lambda run: run.resume_problems)
        found.look_at_traffic(runs)

    def _explain(
        self, found: Verification, runs: list[RankRun], reference: Reference, patch: Patch | None
    ) -> list[str]:
        """What is wrong, the most likely cause first."""
        findings = list(found.problems)
        if found.failures or found.splits or found.wrong_sums:
            more = find_causes(self._runs, found, runs, reference, patch)
            findings += [finding for finding in more if finding not in findings]
        wrong_sums = [found.wrong_sums] if found.wrong_sums else []
        # What differs between replicas cannot be saved, which is no cause of its own.
        return wrong_sums + findings + ([] if found.splits else found.resume_problems)

    def _wrong_formats(self, job: ResolvedJob, plan: ResolvedJob, patch: Patch | None) -> list[str]:
        """Sentences about tensors of a mixed-precision job that do not have the job's dtypes."""
        own, verified = (
            (training.dtype, training.param_dtype, training.reduce_dtype)
            for training in (job.config.training, plan.config.training)
        )
        if len(set(own)) == 1 or own == verified:
            return []

        pool = self.pool(job.dims.world_size)
        results = pool.call(on_rank.run.check_formats, job, patch)
        return list(dict.fromkeys(problem for problems in results for problem in problems))


def _merged(runs: Sequence[RankRun], problems_of: Callable[[RankRun], Sequence[str]]) -> list[str]:
    """The problems that any rank reports, with the ranks if not all report it."""
    ranks: dict[str, list[int]] = {}
    for run in runs:
        for problem in problems_of(run):
            ranks.setdefault(problem, []).append(run.rank)
    everyone = [run.rank for run in runs]
    return [
        problem if found == everyone else f"{name_ranks(found, runs, everyone)}: {problem}"
        for problem, found in ranks.items()
    ]
