"""Verifies one job: trains it on one process and under its plan, and compares every step.

    with Verifier() as verifier:
        verification = verifier.verify(config, steps=5)
        assert verification.agrees, verification.cause

Ranks and references are kept, so that a second plan costs only its own steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from titanlite.config import JobConfig, ResolvedJob, override, resolve_job
from titanlite.errors import ConfigError, RankError, TitanliteError
from titanlite.parallelize.steps import depends_on_microbatch, loss_tolerance
from titanlite.registry import is_over_batch
from titanlite.tools.verify.diagnose import diagnose
from titanlite.tools.verify.differences import (
    Failure,
    Key,
    Tolerance,
    differences,
    failures,
    split_replicas,
)
from titanlite.tools.verify.evidence import JobEvidence
from titanlite.tools.verify.experts import moved_tokens
from titanlite.tools.verify.jobs import (
    PARTS,
    Microbatches,
    accumulation_pair,
    features_off,
    microbatches_of,
    plan_job,
    reference_job,
    saving_job,
)
from titanlite.tools.verify.pool import RankPool
from titanlite.tools.verify.record import RankRun, ReferenceStep
from titanlite.tools.verify.result import Result
from titanlite.tools.verify.wording import name_ranks

Patch = Callable[[], AbstractContextManager[Any]]
"""A context manager that is entered while a plan is built and run, such as a bug to find."""


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


@dataclass
class Verification(Result):
    """The result of verifying one job."""

    job: ResolvedJob
    """The job under its plan, as it ran."""
    dtype: str
    num_steps: int
    reference_parts: int
    """The number of parts in which the reference processes its batch."""
    wrong_sums: str = ""
    """How the batch in parts differs from the undivided batch, on one process."""
    resume_problems: list[str] = field(default_factory=list)
    """Sentences about what is wrong with a run that resumes from the plan's checkpoint."""
    replays: bool = False
    """Whether tokens went to the experts that the reference chose."""
    moved: list[str] = field(default_factory=list)
    """Sentences about tokens that the plan routes to other experts than the reference."""

    @property
    def agrees(self) -> bool:
        return super().agrees and not self.wrong_sums and not self.resume_problems

    @property
    def error_finding(self) -> str:
        """The finding that says only that the plan does not run."""
        return f"the plan does not run: {self.error}"


class Verifier:
    """Verifies jobs on local ranks; leaving the context manager ends the ranks."""

    def __init__(
        self,
        device_type: str = "cpu",
        *,
        timeout_seconds: float = 300,
        max_ranks: int | None = None,
    ) -> None:
        self.device_type = device_type
        self.max_ranks = max_ranks
        self.timeout_seconds = timeout_seconds
        self._pools: dict[int, RankPool] = {}
        self._references: dict[tuple[str, int, Microbatches | None], Reference] = {}
        # (job, steps) -> what is wrong with accumulation on one process; "" for nothing.
        self._sums: dict[tuple[str, int], str] = {}
        self._exits = contextlib.ExitStack()
        self._folder = self._exits.enter_context(
            tempfile.TemporaryDirectory(prefix="titanlite-verify-")
        )

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            # The ranks of all pools end at the same time.
            for pool in self._pools.values():
                pool.dismiss()
        self._exits.__exit__(*error)

    def verify(
        self,
        job: JobConfig | ResolvedJob,
        *,
        steps: int = 5,
        dtype: str = "float64",
        patch: Patch | None = None,
        reloads: bool = False,
        replay: bool = False,
        on_start: Callable[[Verification], None] = lambda _: None,
    ) -> Verification:
        """Run `job` under its plan and on one process for `steps` steps, and compare.

        `patch` is entered on the plan's ranks only. With `reloads`, the plan saves a checkpoint
        after its last step, and a new job that has loaded it is compared too. With `replay`, every
        token goes to the experts to which the reference routed it, so that experts can be compared
        in float32 and bfloat16. `on_start` is called
        once the job has been checked, before it runs. Raises ConfigError if the job cannot be built
        or compared, and TitanliteError if it does not run on one process; an exception of a plan's
        rank is part of the result.
        """
        start = time.perf_counter()
        if isinstance(job, JobConfig):
            job = resolve_job(job)
        plan = plan_job(job, dtype)
        alone = reference_job(plan)
        parts = plan.global_batch_size // alone.config.training.local_batch_size
        found = Verification(plan, dtype, steps, parts)
        on_start(found)
        runs: list[RankRun] = []
        ranks = self.pool(plan.dims.world_size)
        ranks.start()
        with self._saving(plan, reloads) as job_that_saves:

            def start_plan(folder: str) -> None:
                self._start_run(
                    job_that_saves, folder, steps, patch, reloads=reloads, replay=replay
                )

            # The plan runs beside the reference, one step behind it. A reference in parts is
            # checked first: plan and reference both accumulate, so a bug in that would be in both.
            is_beside = parts == 1 and plan.dims.world_size > 1
            try:
                reference = self._reference(
                    alone, steps, microbatches_of(plan), start_plan if is_beside else None
                )
            except BaseException:
                self._close_busy()
                raise
            found.narrowed = reference.narrowed
            if parts > 1:
                self._check_accumulation(found)
            try:
                if not ranks.is_busy:
                    start_plan(reference.folder)
                waits = reloads and ranks is not self.pool(1)
                if waits:
                    self._start_resume_alone(job_that_saves, reference, steps)
                runs = ranks.results()
                if reloads and all(run.reloaded for run in runs):
                    if not waits:
                        self._start_resume_alone(job_that_saves, reference, steps)
                    (runs[0].reloaded_alone,) = self.pool(1).results()
            except TitanliteError as error:
                found.error = self._failure(error)
            except BaseException:
                self._close_busy()
                raise
            if self.pool(1).is_busy:
                # No checkpoint was saved.
                self.pool(1).close(now=True)
        if found.error is not None:
            found.findings = [found.error_finding]
            if cures := self._cures(found, reference, steps, patch):
                words = f"the plan runs, and agrees with one process, if {' or if '.join(cures)}"
                # An error that happens now and then would blame any feature.
                if self._runs(found.job, reference, steps, patch):
                    words = "the plan failed once and ran when it was tried again, so the error is "
                    words += "intermittent: no feature can be named"
                found.findings.insert(0, words)
        else:
            found.replays = replay
            self._judge(found, runs, reference)
            found.problems += self._wrong_formats(job, plan, patch)
            if not found.agrees and dtype == "float64":
                found.findings = list(found.problems)
                if found.failures or found.splits or found.wrong_sums:
                    more = self._diagnose(found, runs, reference, patch)
                    found.findings += [finding for finding in more if finding not in found.findings]
                if found.wrong_sums:
                    found.findings.insert(0, found.wrong_sums)
                found.findings += found.resume_problems
            elif not found.agrees:
                # Only in float64 can patterns be distinguished from rounding error.
                exact = self.verify(job, steps=steps, patch=patch)
                found.findings = found.problems + exact.findings + found.resume_problems or [
                    f"in float64 the plan agrees: in {dtype} its rounding error is larger than on "
                    "one process. Look at the dtypes of sums, reductions and communication"
                ]
        found.seconds = time.perf_counter() - start
        return found

    def pool(self, num_ranks: int) -> RankPool:
        """The pool of `num_ranks` ranks; it starts them at its first call."""
        if num_ranks not in self._pools:
            pool = RankPool(
                num_ranks,
                self.device_type,
                timeout_seconds=self.timeout_seconds,
                max_ranks=self.max_ranks,
            )
            self._pools[num_ranks] = self._exits.enter_context(pool)
        return self._pools[num_ranks]

    def _failure(self, error: TitanliteError) -> RankError:
        """What a plan's rank failed with; raises a ConfigError again: the job itself is wrong."""
        if isinstance(error, ConfigError):
            self._close_busy()
            raise error
        return error if isinstance(error, RankError) else RankError(error.rank or 0, str(error))

    def _close_busy(self) -> None:
        """End ranks whose run has no reader any more."""
        for pool in self._pools.values():
            if pool.is_busy:
                pool.close(now=True)

    def _run(
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
        self._start_run(job, reference.folder, steps, patch, microbatches, replay=replay)
        return self.pool(job.dims.world_size).results()

    def _start_run(
        self,
        job: ResolvedJob,
        folder: str,
        steps: int,
        patch: Patch | None = None,
        microbatches: Microbatches | None = None,
        *,
        reloads: bool = False,
        replay: bool = False,
    ) -> None:
        """Start such a run; `folder` is the reference's, which may still be running."""
        self.pool(job.dims.world_size).submit(
            "titanlite.tools.verify.run:run_plan",
            job,
            steps,
            folder,
            patch,
            microbatches,
            reloads,
            replay,
        )

    def _start_resume_alone(self, saved: ResolvedJob, reference: Reference, step: int) -> None:
        """Let one process load the checkpoint of `saved`, as soon as it is complete."""
        job = saving_job(reference.job, saved.config.job.dump_folder)
        self.pool(1).submit("titanlite.tools.verify.run:resume_alone", job, step, reference.folder)

    @contextlib.contextmanager
    def _saving(self, plan: ResolvedJob, reloads: bool) -> Iterator[ResolvedJob]:
        """The job, with checkpoints in a temporary folder if it is to save one."""
        if not reloads:
            yield plan
            return
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            yield saving_job(plan, folder)

    def _judge(self, found: Verification, runs: list[RankRun], reference: Reference) -> None:
        found.differences = differences(runs, reference.steps)
        found.moved = moved_tokens(runs)
        is_narrow = bool(reference.narrowed)
        config = found.job.config
        found.tolerance = Tolerance(
            found.dtype, is_narrow=is_narrow, loss_tolerance=loss_tolerance(config)
        )
        if found.dtype != "float64":
            found.tolerance = self._measure_rounding(found, reference)
        found.failures = failures(found.differences, found.tolerance)
        if found.failures and found.dtype == "float64":
            self._check_accumulation(found)
            if not found.wrong_sums and not depends_on_microbatch(config):
                # Some tensors have larger rounding errors. Measuring them costs runs, so it is done
                # only if something is above the default tolerance.
                found.tolerance = self._measure_rounding(found, reference)
                found.failures = failures(found.differences, found.tolerance)
        found.splits = split_replicas(runs)
        found.problems = _merged(runs, lambda run: run.problems)
        found.problems += [p for p in reference.problems if p not in found.problems]
        found.resume_problems = _merged(runs, lambda run: run.resume_problems)

    def _wrong_formats(self, job: ResolvedJob, plan: ResolvedJob, patch: Patch | None) -> list[str]:
        """Sentences about tensors of a mixed-precision job that do not have the job's dtypes."""
        training = job.config.training
        formats = (training.dtype, training.param_dtype, training.reduce_dtype)
        verified = plan.config.training
        if len(set(formats)) == 1 or formats == (
            verified.dtype,
            verified.param_dtype,
            verified.reduce_dtype,
        ):
            return []
        results = self.pool(job.dims.world_size).call(
            "titanlite.tools.verify.run:check_formats", job, patch
        )
        return list(dict.fromkeys(problem for problems in results for problem in problems))

    def _diagnose(
        self,
        found: Verification,
        runs: list[RankRun],
        reference: Reference,
        patch: Patch | None,
    ) -> list[str]:
        """Run the first differing step again with detailed recording, and find the cause."""
        evidence = JobEvidence(
            found.job.dims,
            reference.steps,
            runs,
            found.differences,
            found.failures,
            found.splits,
            job=found.job,
        )
        step, names = max(1, evidence.step), evidence.failed("gradient")
        ranks, trace = self.pool(found.job.dims.world_size), "titanlite.tools.verify.trace"
        lost: list[str] = []
        try:
            (evidence.reference_trace,) = self.pool(1).call(
                f"{trace}:trace_reference", reference.job, step, reference.folder, found.job, names
            )
            modules = evidence.reference_trace.modules
            evidence.traces = ranks.call(
                f"{trace}:trace_plan", found.job, step, reference.folder, names, modules, patch
            )
            kinds = ("start", "loss", "norm", "gradient", "weight", "state")
            if any(map(evidence.failed, kinds)):
                evidence.cured_by = self._cures(found, reference, step, patch)
        except TitanliteError as error:
            lost = [f"recording step {step} in detail failed ({self._failure(error)})"]
        return diagnose(evidence) + lost

    def _runs(
        self, job: ResolvedJob, reference: Reference, steps: int, patch: Patch | None
    ) -> bool:
        """Whether the job runs to its end."""
        try:
            self._run(job, reference, steps, patch)
        except TitanliteError as error:
            self._failure(error)
            return False
        return True

    def _cures(
        self, found: Verification, reference: Reference, step: int, patch: Patch | None
    ) -> list[str]:
        """The settings, each turning one feature off, with which the plan agrees."""
        cures = []
        for changes in features_off(found.job.config):
            config = override(found.job.config, changes)
            without = resolve_job(config, found.job.dims.world_size)
            try:
                runs = self._run(without, reference, step, patch)
            except TitanliteError as error:
                self._failure(error)
                continue
            if not failures(differences(runs, reference.steps[: step + 1]), found.tolerance):
                cures += [f"{key} = {json.dumps(value)}" for key, value in changes.items()]
        return cures

    def _reference(
        self,
        alone: ResolvedJob,
        steps: int,
        microbatches: Microbatches | None = None,
        start_plan: Callable[[str], None] | None = None,
    ) -> Reference:
        """Run a job on one process, or return the earlier run of the same job.

        While it runs, `start_plan` is called with its folder, in which each step's record appears.
        """
        key = alone.config.model_dump_json(exclude_unset=True), steps, microbatches
        if key not in self._references:
            folder = tempfile.mkdtemp(dir=self._folder)
            try:
                self.pool(1).submit(
                    "titanlite.tools.verify.run:run_reference",
                    alone,
                    steps,
                    folder,
                    microbatches,
                    start_plan is not None,
                )
                if start_plan is not None:
                    start_plan(folder)
                (run,) = self.pool(1).results()
            except RankError as error:
                raise TitanliteError(
                    f"{error.rank_traceback}\nthe job does not run on one process: "
                    f"{error.message}".strip()
                ) from error
            _require_finite(run.steps)
            self._references[key] = Reference(alone, folder, run.steps, run.narrowed, run.problems)
        return self._references[key]

    def _measure_rounding(self, found: Verification, reference: Reference) -> Tolerance:
        """Measure the reference's rounding error against its batch in parts and against float64.

        In float8, and with a loss over the whole batch, parts are not compared: the numbers depend
        on how the batch is split.
        """
        microbatches = microbatches_of(found.job)
        is_whole = bool(microbatches) or is_over_batch(found.job.config.training.loss)
        others = [] if is_whole else [reference_job(found.job, num_parts=PARTS)]
        if found.dtype != "float64":
            self._check_accumulation(found)
            others.append(reference_job(plan_job(found.job, "float64")))
        rounding: list[dict[Key, float]] = [{} for _ in reference.steps]
        for other in others:
            runs = self._run(
                other, reference, found.num_steps, None, microbatches, replay=found.replays
            )
            for total, of_step in zip(rounding, differences(runs, reference.steps), strict=True):
                for key, value in of_step.items():
                    total[key] = max(total.get(key, 0.0), value)
        return Tolerance(
            found.dtype, rounding, bool(reference.narrowed), loss_tolerance(found.job.config)
        )

    def _check_accumulation(self, found: Verification) -> None:
        """Check that on one process, in float64, the result does not depend on splitting the batch.

        If the batch in parts gives another result than the batch at once, the batch is run at once
        a second time. If that differs too, the job is random. If it does not, but a module's output
        for a sequence depends on the rest of the batch, the model has batch statistics. Both raise
        ConfigError. Otherwise the loss mixes samples, or the sum over the parts is wrong, which
        goes into `wrong_sums`.
        A job whose numbers depend on the microbatches, as in float8, is not checked.
        """
        if depends_on_microbatch(found.job.config):
            return
        pair = accumulation_pair(plan_job(found.job, "float64"))
        if pair is None or found.wrong_sums:
            return
        at_once, in_parts = pair
        reference = self._reference(at_once, found.num_steps)
        if reference.narrowed:
            return
        key = at_once.config.model_dump_json(exclude_unset=True), found.num_steps
        if key not in self._sums:
            self._sums[key] = self._explain_sums(reference, in_parts, found.num_steps)
        found.wrong_sums = self._sums[key]

    def _explain_sums(self, reference: Reference, in_parts: ResolvedJob, num_steps: int) -> str:
        """What is wrong with the sum over parts of the batch; "" for nothing."""
        runs = self._run(in_parts, reference, num_steps)
        cut = Verification(in_parts, "float64", num_steps, 1)
        cut.differences = differences(runs, reference.steps)
        cut.tolerance = Tolerance("float64", [dict.fromkeys(s, 1.0) for s in cut.differences])
        cut.failures = failures(cut.differences, cut.tolerance)
        # Wrong learning rates are reported elsewhere, and a buffer may count microbatches.
        cut.failures = [f for f in cut.failures if f.kind not in ("lr", "buffer")]
        if not cut.failures or any(f.kind == "start" for f in cut.failures):
            return ""
        again = differences(self._run(reference.job, reference, num_steps), reference.steps)
        unlike = [f for f in failures(again, Tolerance("float64")) if f.kind != "lr"]
        if unlike:
            first = unlike[0]
            (who,) = self.pool(1).call(
                "titanlite.tools.verify.inspect_model:find_random", reference.job
            )
            which = f": {who} from torch's own generators" if who else ""
            raise ConfigError(
                f"model.name: on one process the same batch gives another {_what(first)} at step "
                f"{first.step} the second time (difference {first.difference:.0e}), so the model "
                f"is random{which}; set dropout to 0 to verify, or draw what depends on the sample "
                "alone, by titanlite.TokenDropout and titanlite.keyed_normal (docs/randomness.md)"
            )
        (mixing,) = self.pool(1).call(
            "titanlite.tools.verify.inspect_model:find_mixing", reference.job
        )
        if mixing.module:
            raise ConfigError(
                f"model.name: the output of {mixing.module} for a sequence depends on the other "
                "sequences of the batch (batch statistics), so the result depends on how a plan "
                "splits the batch; use a norm over each sample such as GroupNorm, SyncBatchNorm on "
                "GPUs, or fixed statistics (eval mode)"
            )
        if mixing.is_mean:
            return (
                "the loss is a mean over the samples that it is given, so it depends on how the "
                "batch is split; let total(outputs, batch) return their sum (docs/losses.md)"
            )
        if mixing.of_loss:
            return (
                "the loss of one sample depends on other samples: on one process, the losses of "
                f"the samples one by one differ from those together by {mixing.of_loss:.1e}. A "
                "rank or microbatch has only some of the batch, so plans train on other losses; "
                'register the loss with over="batch" (docs/losses.md)'
            )
        first = cut.failures[0]
        causes = self._diagnose(cut, runs, reference, None)
        num_parts = reference.job.global_batch_size // in_parts.config.training.local_batch_size
        return (
            f"accumulation is wrong even without parallelism: on one process, a batch in "
            f"{num_parts} parts gives another {_what(first)} at step {first.step} than the "
            f"undivided batch (difference {first.difference:.1e}). The model is not random and "
            f"does not mix sequences, so the sum over the parts is wrong: {causes[0]}"
        )


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


def _what(failure: Failure) -> str:
    """The differing quantity, in words."""
    words = {"norm": "gradient norm", "lr": "learning rate", "state": "optimizer state"}
    what = words.get(failure.kind, failure.kind)
    return f"{what} of {failure.name}" if failure.name else what


def _require_finite(reference: list[ReferenceStep]) -> None:
    for step, numbers in enumerate(reference):
        for words, value in (("loss", numbers.loss), ("gradient norm", numbers.norm)):
            if not math.isfinite(value):
                raise ConfigError(
                    f"model.name: on one process the {words} of step {step} is {value}, which "
                    "cannot be compared; give a lower optimizer.lr, fewer --steps or another model"
                )
