"""Finds the cause of a job's differences: runs a step again in detail, and without its features."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from titanlite.config import override, resolve_job
from titanlite.errors import TitanliteError
from titanlite.tools.verify.diagnose import QUESTIONS_OF_JOB, diagnose
from titanlite.tools.verify.differences import differences, failures
from titanlite.tools.verify.evidence import JobEvidence
from titanlite.tools.verify.job_runs import JobRuns, Reference, failure
from titanlite.tools.verify.jobs import JobRun, Patch, features_off
from titanlite.tools.verify.record import RankRun, RankTrace, ReferenceTrace
from titanlite.tools.verify.result import Verification

if TYPE_CHECKING:
    from titanlite.ranks.world import World


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
    evidence = JobEvidence(
        found.job.dims,
        reference.steps,
        measured,
        found,
        job=found.job,
    )
    step = max(1, evidence.step)
    lost: list[str] = []
    try:
        _trace(runs, evidence, reference, step, patch)
        kinds = ("start", "loss", "norm", "gradient", "weight", "state")
        if any(map(evidence.failed, kinds)):
            evidence.cured_by = find_cures(runs, found, reference, step, patch)
    except TitanliteError as error:
        lost = [f"recording step {step} in detail failed ({failure(error)})"]
    return diagnose(evidence, QUESTIONS_OF_JOB) + lost


def _trace(
    runs: JobRuns, evidence: JobEvidence, reference: Reference, step: int, patch: Patch | None
) -> None:
    """Add the recordings of `step` to the evidence."""
    job, alone, folder = evidence.job, reference.job, reference.folder
    names = evidence.failed("gradient")

    def trace_alone(world: World) -> ReferenceTrace:
        from titanlite.tools.verify.job_trace import trace_reference

        return trace_reference(world, alone, step, folder, job, names)

    known = evidence.reference_trace = runs.pools.alone(trace_alone)

    def trace_rank(world: World) -> RankTrace:
        from titanlite.tools.verify.job_trace import trace_plan

        return trace_plan(world, job, step, folder, names, known.modules, patch)

    evidence.traces = runs.pools.of(job.dims.world_size).call(trace_rank)


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
