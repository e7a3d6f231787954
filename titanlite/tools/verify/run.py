"""On a rank: records the reference of a job, and measures a plan against that record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from titanlite.config import ResolvedJob
from titanlite.errors import TitanliteError
from titanlite.job import Job
from titanlite.modules.batch import Batch, join
from titanlite.modules.shards import local_part, shard_of
from titanlite.observe.failing import naming_failures, styles_of
from titanlite.ranks.hang_state import recorded_calls
from titanlite.ranks.world import World
from titanlite.tools.verify import formulas
from titanlite.tools.verify.agreement import digest_of, is_pending, placements_of
from titanlite.tools.verify.economy import Traffic
from titanlite.tools.verify.inspect_model import find_narrowed
from titanlite.tools.verify.jobs import JobRun, Patch, scheduled_lr
from titanlite.tools.verify.opened import open_job, subject_of
from titanlite.tools.verify.perturbation import Perturbation
from titanlite.tools.verify.record import RankRun, RankStep, ReferenceRun, ReferenceStep
from titanlite.tools.verify.recurrence import Recurrence, one_seed_for_all
from titanlite.tools.verify.reload import save_and_load
from titanlite.tools.verify.routing import followed_routing, recorded_routing, routing_record
from titanlite.tools.verify.sequences import cut_again, leave_out_targets, look_at_data
from titanlite.tools.verify.step_files import load, store
from titanlite.tools.verify.watching import StepWatch
from titanlite.training.initial_weights import generator_for
from titanlite.training.step import StepResult


def run_reference(
    world: World, run: JobRun, folder: str, *, is_beside: bool = False
) -> ReferenceRun:
    """Train the job of `run` on one process, and write a record of each step into `folder`.

    With `is_beside`, the plan runs at the same time, and the reference uses half of the cores.
    """
    resolved, steps = run.job, run.steps
    threads = _half_of_threads() if is_beside else contextlib.nullcontext()
    with threads, open_job(world, resolved) as job:
        drawn = draw_zero_parameters(job, None)
        subject = subject_of(job)
        store({"weights": subject.whole_weights(), "drawn": drawn}, folder, 0)
        result = ReferenceRun([ReferenceStep()])
        start = load(folder, 0)["weights"]
        problems = list(one_seed_for_all(start))
        recurrence = Recurrence(job, start)
        left_over: list[str] = []
        for step in range(1, steps + 1):
            batches = job.draw()
            whole = join(batches).to(torch.device("cpu"))
            gradients: dict[str, Tensor] = {}

            def keep(gradients: dict[str, Tensor] = gradients) -> None:
                gradients.update(subject.whole_gradients())

            batches = cut_again(leave_out_targets(job, batches), run.microbatches)
            if step == 1 and resolved.config.training.param_dtype == "float64":
                result.narrowed = find_narrowed(job, batches)
            with recorded_routing(job) as routed:
                done = job.trainer.step(batches, on_gradients=keep)
            numbers = ReferenceStep()
            _note_numbers(numbers, job, done)
            numbers.lr = scheduled_lr(resolved.config, step)
            result.steps.append(numbers)
            record = {
                "fields": dict(whole.fields),
                "gradients": gradients,
                "lr": done.lr,
                **subject.whole_tensors(),
                "routing": {} if run.microbatches else routing_record(routed),
            }
            store(record, folder, step)
            left_over = left_over or list(formulas.left_over_gradients(job, step))
            problems += recurrence.problems(step, batches, record, numbers)
            if resolved.config.validation.enable and step in (1, steps):
                shown = _validate(numbers, job, problems)
                # The first average is equal to the weights.
                if step == (1 if job.trainer.average is None else steps):
                    problems += formulas.wrong_validation(job, shown)
        result.problems = tuple(dict.fromkeys([*left_over, *problems]))
        return result


def run_plan(world: World, run: JobRun, folder: str) -> RankRun:
    """Train the job of `run`, and measure this rank's part against the record in `folder`.

    Every rank of the world must call this.
    """
    calls_before = {call.group: call.number for call in recorded_calls()}
    steps, section = run.steps, run.job.config.validation
    with world.watch.patched(run.patch or contextlib.nullcontext), open_job(world, run.job) as job:
        start = load(folder, 0)
        draw_zero_parameters(job, start["drawn"])
        subject = subject_of(job)
        parameters = {name: one.parameter for name, one in subject.local.items()}
        problems = list(formulas.optimizer_problems(job))
        placements = {name: placements_of(job, parameter) for name, parameter in parameters.items()}
        expected = {
            name: digest_of(one.part_of(start["weights"][name]))
            for name, one in subject.local.items()
            if name in start["weights"]
        }
        seen = [RankStep(weights=subject.compare_weights(start["weights"]))]
        pending: tuple[str, ...] = ()
        left_over, stale = list[str](), list[str]()
        traffic = Traffic()
        for step in range(1, steps + 1):
            record = load(folder, step)
            batches = job.draw()
            found = RankStep(**look_at_data(job, join(batches), record["fields"]))

            def look(found: RankStep = found, expected: Any = record["gradients"]) -> None:
                nonlocal pending
                found.gradients = subject.compare_gradients(expected)
                pending = pending or tuple(
                    name for name, parameter in parameters.items() if is_pending(parameter.grad)
                )

            batches = leave_out_targets(job, batches, record["fields"])
            batches = cut_again(batches, run.microbatches)
            done, found.moved, sent = _take_step(job, run, step, batches, record["routing"], look)
            if sent is not None:
                traffic, traffic.part = sent, str(found.sequences)
            if step == 1:
                problems += formulas.wrong_reductions(job, calls_before)
                problems += _wrongly_trained(found, record["gradients"], parameters)
            left_over = left_over or list(formulas.left_over_gradients(job, step))
            stale = stale or list(formulas.stale_parameters(job, step, parameters))
            _note_numbers(found, job, done)
            found.weights = subject.compare_weights(record["weights"])
            problems += [
                f"step {step} changes the frozen weight {name}"
                for name, parameter in parameters.items()
                if not parameter.requires_grad and found.weights[name].error > 0
            ]
            found.state = subject.compare_state(record["state"])
            found.buffers = subject.compare_buffers(record["buffers"])
            if section.enable and step in (1, steps):
                _validate(found, job, problems, is_stale=bool(stale))
            seen.append(found)
        reloaded, resume_problems = None, list[str]()
        if run.reloads:
            try:
                reloaded = save_and_load(job, steps, record, resume_problems)
            except TitanliteError as error:
                resume_problems.append(f"the plan's checkpoint cannot be saved and loaded: {error}")
        return RankRun(
            world.rank,
            job.dims.coordinates(world.rank),
            placements,
            pending,
            expected,
            seen,
            (*stale, *problems, *left_over),
            tuple(resume_problems),
            reloaded,
            styles=_style_names(job),
            traffic=traffic,
        )


def _take_step(
    job: Job,
    run: JobRun,
    step: int,
    batches: list[Batch],
    routing: Any,
    on_gradients: Callable[[], None],
) -> tuple[StepResult, Any, Traffic | None]:
    """Train one step: its result, moved tokens, and what it sent in step 2 or the only one."""
    perturbation = Perturbation(run.job.config.training.param_dtype, run.perturbed, step)
    if run.perturbed:
        perturbation.perturb(job.trainer.parameters)
        batches = [b.replace(**perturbation.inputs(dict(b.fields))) for b in batches]

    def look() -> None:
        perturbation.restore()
        on_gradients()

    watch = None
    if step == min(2, run.steps) and not (run.perturbed or run.job.config.compile.enable):
        groups = subject_of(job).groups
        watch = StepWatch(groups, job.parameters, [batch.fields for batch in batches])
    with (
        naming_failures(job, every=True) if step == 1 else contextlib.nullcontext(),
        followed_routing(job, batches, routing, replay=run.replay) as moved,
        watch.seeing() if watch else contextlib.nullcontext(),
    ):
        done = job.trainer.step(batches, on_gradients=watch.unseen(look) if watch else look)
    return done, moved, watch.traffic() if watch else None


def _wrongly_trained(
    found: RankStep, known: Mapping[str, Tensor], parameters: Mapping[str, torch.nn.Parameter]
) -> Iterator[str]:
    """Parameters that only the plan, or only one process, trains."""
    for name, parameter in parameters.items():
        if name in known and not parameter.requires_grad:
            yield f"{name} requires a gradient on one process, but not under the plan"
    for name in found.gradients:
        if name not in known:
            yield f"{name} is frozen on one process, but has a gradient under the plan"


def _style_names(job: Job) -> dict[str, str]:
    """Parameter -> the class of its entry in the tensor-parallel plan."""
    entries = styles_of(job)
    holders = {name: name.rpartition(".")[0] for name in job.parameters}
    return {
        name: entries[holder].partition(": ")[2].partition("(")[0]
        for name, holder in holders.items()
        if holder in entries
    }


def _note_numbers(step: ReferenceStep, job: Job, done: StepResult) -> None:
    step.loss, step.norm, step.lr = done.loss, done.grad_norm, done.lr
    step.num_targets, step.auxiliary_loss = done.num_targets, done.auxiliary_loss
    step.loads = loads_of(job)


def _validate(
    step: ReferenceStep, job: Job, problems: list[str], *, is_stale: bool = False
) -> float:
    validated = formulas.validate_unchanged(job, problems, is_stale=is_stale)
    step.validation, step.metrics = validated.loss, dict(validated.metrics)
    return validated.loss


def check_formats(world: World, resolved: ResolvedJob, patch: Patch | None) -> tuple[str, ...]:
    """One step in the job's own number formats: sentences about tensors in other formats."""
    calls_before = {call.group: call.number for call in recorded_calls()}
    with world.watch.patched(patch or contextlib.nullcontext), open_job(world, resolved) as job:
        job.trainer.step(job.draw())
        return (*formulas.wrong_formats(job), *formulas.wrong_reductions(job, calls_before))


@contextlib.contextmanager
def _half_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def draw_zero_parameters(job: Job, names: list[str] | None) -> list[str]:
    """Draw random values for the parameters that start at zero; returns their names.

    These are the parameters in `names`, or if it is None all that are zero. Below a zero output
    layer every gradient of the first step is zero, and zero agrees with everything. A zero bias
    that is added twice changes nothing, and after a step of AdamW a tensor that was zero holds only
    quotients g / (|g| + eps), in which the rounding error of a small g is large.
    """
    found = []
    for name, parameter in job.parameters.items():
        local = local_part(parameter)
        if name in names if names is not None else not local.any():
            whole = torch.empty(parameter.shape)
            whole.normal_(0.0, 0.02, generator=generator_for(job.config.debug.seed, name))
            local.copy_(shard_of(whole, parameter))
            found.append(name)
    return found


def loads_of(job: Job) -> dict[str, tuple[int, ...]]:
    """The tokens of each expert of each layer in the last step, as the balancing counts them."""
    balancer = job.trainer.balancer
    counts = {} if balancer is None else balancer.counts
    return {name: tuple(of_layer) for name, of_layer in counts.items()}
