"""Finds the cause of a job's differences: runs a step again in detail, and without its features."""

from __future__ import annotations

import json
import math

from titanlite.config import override, resolve_job
from titanlite.errors import TitanliteError
from titanlite.tools.verify import on_rank
from titanlite.tools.verify.diagnose import QUESTIONS_OF_JOB, diagnose
from titanlite.tools.verify.differences import differences, failures
from titanlite.tools.verify.evidence import JobEvidence
from titanlite.tools.verify.job_runs import JobRuns, Reference, failure
from titanlite.tools.verify.jobs import JobRun, Patch, features_off
from titanlite.tools.verify.record import RankRun
from titanlite.tools.verify.result import Verification
from titanlite.tools.verify.wording import distinct_texts

EVALUATED = {"validation", "metric"}
# The relative difference below which two runs of one step are the same, in float64.
SAME = 1e-9


def find_causes(
    runs: JobRuns,
    found: Verification,
    measured: list[RankRun],
    reference: Reference,
    patch: Patch | None = None,
) -> list[str]:
    """What is wrong with a plan that differs, the most likely cause first.

    The first differing step is run again with detailed recording, and with features turned off.
    """
    evidence = JobEvidence(found.job.dims, reference.steps, measured, found, job=found.job)
    first = {f.kind for f in found.failures if f.step == evidence.step}
    if first and first <= EVALUATED:
        # If training is wrong too, that is diagnosed.
        later = [f.step for f in found.failures if f.kind not in EVALUATED]
        evidence.later, evidence.evaluates = min(later, default=None), not later
    step = max(1, evidence.step)
    lost: list[str] = []
    try:
        _trace(runs, evidence, reference, step, patch)
        if lost := _not_replayed(evidence) if evidence.step else []:
            # Only what was measured counts, and another run of the plan would show nothing.
            evidence.traces, evidence.watched, evidence.reference_trace = (), (), None
        kinds = ("start", "loss", "norm", "gradient", "weight", "state")
        if not lost and any(map(evidence.failed, kinds)):
            evidence.cured_by = find_cures(runs, found, reference, step, patch)
    except TitanliteError as error:
        lost = [f"recording step {step} in detail failed ({failure(error)})"]
    causes = diagnose(evidence, QUESTIONS_OF_JOB)
    return [*lost, *causes] if causes[0].startswith("unexplained") else [*causes, *lost]


def _not_replayed(e: JobEvidence) -> list[str]:
    """Whether a step has other numbers when it is run again, in a sentence."""
    for run, trace in zip(e.runs, e.traces, strict=False):
        seen, step = run.steps[e.step], e.step
        squares = sum(one.aa for one in seen.gradients.values())
        for what, own, again in (
            ("loss", seen.loss, trace.loss),
            ("sum of squared gradients", squares, trace.squares),
        ):
            if trace.loss is None or again is None or not math.isfinite(own + again):
                continue
            if not math.isclose(own, again, rel_tol=SAME):
                shown = distinct_texts(own, again)
                return [
                    f"step {step} has another {what} when the same steps are run again "
                    f"({shown[1]} instead of {shown[0]} on rank {run.rank}), so what is wrong "
                    "depends on the state of the process, such as a counter or a cache, on random "
                    "numbers or on timing. No module can be named"
                ]
    return []


def _trace(
    runs: JobRuns, evidence: JobEvidence, reference: Reference, step: int, patch: Patch | None
) -> None:
    """Add the recordings of `step`, or of the validation after it, to the evidence."""
    job, alone, folder = evidence.job, reference.job, reference.folder
    names, evaluates = evidence.failed("gradient"), evidence.evaluates

    trace = on_rank.job_trace.trace_reference
    known = runs.pools.alone(trace, alone, step, folder, job, names, evaluates=evaluates)
    what = job, step, folder, names, known, patch
    pool = runs.pools.of(job.dims.world_size)
    traces = pool.call(on_rank.job_trace.trace_plan, *what, evaluates=evaluates)
    evidence.reference_trace, evidence.traces, evidence.watched = known, traces, traces


def explain_error(
    runs: JobRuns, found: Verification, reference: Reference, patch: Patch | None
) -> list[str]:
    """Why a plan does not run: the features without which it does."""
    cures = find_cures(runs, found, reference, found.num_steps, patch)
    if not cures:
        return [found.error_finding]
    words = f"the plan runs, and agrees with one process, if {' or if '.join(cures)}"
    # An error that happens now and then would blame any feature.
    try:
        runs.run(JobRun(found.job, found.num_steps, patch), reference)
    except TitanliteError as error:
        failure(error)
    else:
        words = "the plan failed once and ran when it was tried again, so the error is "
        words += "intermittent: no feature can be named"
    return [words, found.error_finding]


def find_cures(
    runs: JobRuns, found: Verification, reference: Reference, step: int, patch: Patch | None
) -> list[str]:
    """The settings, each turning one feature off, with which the plan agrees."""
    cures = []
    for changes in features_off(found.job.config):
        config = override(found.job.config, changes)
        without = resolve_job(config, found.job.dims.world_size)
        try:
            measured = runs.run(JobRun(without, step, patch), reference)
        except TitanliteError as error:
            failure(error)
            continue
        if not failures(differences(measured, reference.steps[: step + 1]), found.tolerance):
            cures += [f"{key} = {json.dumps(value)}" for key, value in changes.items()]
    return cures
