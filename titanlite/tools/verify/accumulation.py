"""Does a job on one process depend on how its batch is split? And how large is its rounding error?

A plan splits the batch, so a job whose result depends on the split cannot be compared.
"""

from __future__ import annotations

from titanlite.config import ResolvedJob
from titanlite.errors import ConfigError
from titanlite.parallelize.steps import depends_on_microbatch
from titanlite.registry import is_over_batch
from titanlite.tools.verify import jobs, on_rank
from titanlite.tools.verify.causes import find_causes
from titanlite.tools.verify.differences import (
    WORDS,
    Disagreement,
    Key,
    Tolerance,
    differences,
    failures,
    largest_of,
)
from titanlite.tools.verify.job_runs import JobRuns, Reference
from titanlite.tools.verify.result import Verification
from titanlite.tools.verify.sensitivity import NUM_PERTURBED


class Accumulation:
    """Checks jobs on one process, in float64, with the batch at once and in parts."""

    def __init__(self, runs: JobRuns) -> None:
        self._runs = runs
        # (job, steps) -> what is wrong with accumulation on one process; "" for nothing.
        self._found: dict[tuple[str, int], str] = {}

    def problem(self, plan: ResolvedJob, num_steps: int) -> str:
        """How the batch in parts differs from the undivided batch; "" if it does not.

        If it does, the batch is run at once a second time. If that differs too, the job is random.
        If it does not, but a module's output for a sequence depends on the rest of the batch, the
        model has batch statistics. Both raise ConfigError. Otherwise the loss mixes samples, or the
        sum over the parts is wrong.
        A job whose numbers depend on the microbatches, as in float8, is not checked.
        """
        if depends_on_microbatch(plan.config):
            return ""
        pair = jobs.accumulation_pair(jobs.plan_job(plan, "float64"))
        if pair is None:
            return ""
        at_once, in_parts = pair
        reference = self._runs.reference(jobs.JobRun(at_once, num_steps))
        if reference.narrowed:
            return ""
        key = at_once.config.model_dump_json(exclude_unset=True), num_steps
        if key not in self._found:
            self._found[key] = self._explain(reference, in_parts, num_steps)
        return self._found[key]

    def _explain(self, reference: Reference, in_parts: ResolvedJob, num_steps: int) -> str:
        """What is wrong with the sum over parts of the batch; "" for nothing."""
        runs = self._runs.run(jobs.JobRun(in_parts, num_steps), reference)
        cut = Verification(in_parts, "float64", num_steps, 1)
        cut.differences = differences(runs, reference.steps)
        cut.judge(Tolerance("float64", [dict.fromkeys(s, 1.0) for s in cut.differences]))
        # Wrong learning rates are reported elsewhere, and a buffer may count microbatches.
        cut.failures = [f for f in cut.failures if f.kind not in ("lr", "buffer")]
        if not cut.failures or any(f.kind == "start" for f in cut.failures):
            return ""
        self._require_fixed(reference, num_steps)
        if why := self._mixing(reference.job):
            return why
        first = cut.failures[0]
        causes = find_causes(self._runs, cut, runs, reference)
        num_parts = reference.job.global_batch_size // in_parts.config.training.local_batch_size
        return (
            f"accumulation is wrong even without parallelism: on one process, a batch in "
            f"{num_parts} parts gives another {_what(first)} at step {first.step} than the "
            f"undivided batch (difference {first.difference:.1e}). The model is not random and "
            f"does not mix sequences, so the sum over the parts is wrong: {causes[0]}"
        )

    def _require_fixed(self, reference: Reference, num_steps: int) -> None:
        """Raises ConfigError if the same job gives another result when it is run again."""
        job = reference.job
        again = differences(self._runs.run(jobs.JobRun(job, num_steps), reference), reference.steps)
        unlike = [f for f in failures(again, Tolerance("float64")) if f.kind != "lr"]
        if not unlike:
            return
        who = self._runs.pools.alone(on_rank.inspect_model.find_random, job)
        first, which = unlike[0], f": {who} from torch's own generators" if who else ""
        raise ConfigError(
            f"model.name: on one process the same batch gives another {_what(first)} at step "
            f"{first.step} the second time (difference {first.difference:.0e}), so the model "
            f"is random{which}; set dropout to 0 to verify, or draw what depends on the sample "
            "alone, by TokenDropout and keyed_normal of titanlite.modules (docs/randomness.md)"
        )

    def _mixing(self, job: ResolvedJob) -> str:
        """How the loss mixes samples; "" if it does not. Raises ConfigError if a module does."""
        module, of_loss = self._runs.pools.alone(on_rank.inspect_model.find_mixing, job)
        if module:
            raise ConfigError(
                f"model.name: the output of {module} for a sequence depends on the other "
                "sequences of the batch (batch statistics), so the result depends on how a plan "
                "splits the batch; use a norm over each sample such as GroupNorm, SyncBatchNorm on "
                "GPUs, or fixed statistics (eval mode)"
            )
        return of_loss


def measure_rounding(
    runs: JobRuns, found: Verification, reference: Reference, *, perturbs: bool = False
) -> list[dict[Key, float]]:
    """The reference's differences from its batch in parts, and from float64.

    With `perturbs`, its largest differences from itself with weights and inputs perturbed, the last
    time with its batch in parts, since long sums round by their order, too. In float8, and with a
    loss over the whole batch, there are no parts: the numbers depend on how the batch is split.
    """
    microbatches = jobs.microbatches_of(found.job)
    is_whole = bool(microbatches) or is_over_batch(found.job.config.training.loss)
    others = [] if is_whole else [jobs.reference_job(found.job, num_parts=jobs.PARTS)]
    if perturbs:
        others = [reference.job] * (NUM_PERTURBED - len(others)) + others
    elif found.dtype != "float64":
        others.append(jobs.reference_job(jobs.plan_job(found.job, "float64")))

    orders = [
        jobs.JobRun(
            other,
            found.num_steps,
            microbatches=microbatches,
            replay=found.replays,
            perturbed=number if perturbs else 0,
        )
        for number, other in enumerate(others, 1)
    ]
    measured = (
        differences(runs.run(one, reference), reference.steps, by_distance=perturbs)
        for one in orders
    )
    return largest_of(measured, len(reference.steps))


def _what(failure: Disagreement) -> str:
    """The differing quantity, in words."""
    what = WORDS[failure.kind].removeprefix("the ")
    return f"{what} of {failure.name}" if failure.name else what
