"""On a rank: records the reference, and measures a plan against that record.

The reference's tensors are in one file per step, which every rank maps into memory. A rank compares
its own shards with its slices of these tensors. So nothing is gathered, every replica is checked,
and the ranks on which something differs are known.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.config import ResolvedJob
from titanlite.errors import TitanliteError
from titanlite.job import Job, build_job
from titanlite.modules.batch import join
from titanlite.modules.shards import local_part, shard_of, whole_tensor
from titanlite.observe.failing import naming_failures
from titanlite.ranks.hang_state import recorded_calls
from titanlite.ranks.world import World
from titanlite.tools.verify.agreement import (
    agreement_of,
    agreements,
    all_buffers,
    digest_of,
    is_pending,
    optimizer_state,
    placements_of,
    same_part,
    state_agreements,
)
from titanlite.tools.verify.formulas import (
    left_over_gradients,
    optimizer_problems,
    validate_unchanged,
    wrong_formats,
    wrong_reductions,
    wrong_validation,
)
from titanlite.tools.verify.inspect_model import find_narrowed
from titanlite.tools.verify.jobs import Microbatches, scheduled_lr
from titanlite.tools.verify.opened import open_job
from titanlite.tools.verify.record import RankRun, RankStep, ReferenceRun, ReferenceStep
from titanlite.tools.verify.recurrence import Recurrence, one_seed_for_all
from titanlite.tools.verify.routing import followed_routing, recorded_routing, routing_record
from titanlite.tools.verify.sequences import cut_again, leave_out_targets, look_at_data
from titanlite.training.initialize import generator_for

Patch = Callable[[], AbstractContextManager[Any]]
"""A context manager that is entered while a plan is built and run, such as a bug to find."""

# The time between two looks for a file that another process is to write.
WAIT_SECONDS = 0.005


def step_file(folder: str, step: int) -> Path:
    """The file of the reference's record of `step`; step 0 is the start."""
    return Path(folder) / f"step{step}.pt"


def run_reference(
    world: World,
    resolved: ResolvedJob,
    steps: int,
    folder: str,
    microbatches: Microbatches | None = None,
    is_beside: bool = False,
) -> ReferenceRun:
    """Train the job for `steps` steps on one process and write a record of each into `folder`.

    With `microbatches`, a step's batch is split into these instead of the job's own. With
    `is_beside`, the plan runs at the same time, and the reference uses half of the cores.
    """
    threads = _half_of_threads() if is_beside else contextlib.nullcontext()
    with threads, open_job(world, resolved) as job:
        drawn = draw_zero_parameters(job, None)
        _store({"weights": _whole(job.whole_parameters()), "drawn": drawn}, folder, 0)
        run = ReferenceRun([ReferenceStep()])
        start = load(folder, 0)["weights"]
        problems = list(one_seed_for_all(start))
        recurrence = Recurrence(job, start)
        left_over: list[str] = []
        for step in range(1, steps + 1):
            batches = job.draw()
            whole = join(batches).to(torch.device("cpu"))
            gradients: dict[str, Tensor] = {}

            def keep(gradients: dict[str, Tensor] = gradients) -> None:
                gradients.update(_whole(job.whole_gradients()))

            batches = cut_again(leave_out_targets(job, batches), microbatches)
            if step == 1 and resolved.config.training.param_dtype == "float64":
                run.narrowed = find_narrowed(job, batches)
            with recorded_routing(job) as routed:
                done = job.trainer.step(batches, on_gradients=keep)
            run.steps.append(
                ReferenceStep(
                    done.loss,
                    done.grad_norm,
                    scheduled_lr(resolved.config, step),
                    done.num_targets,
                    loads=loads_of(job),
                    auxiliary_loss=done.auxiliary_loss,
                )
            )
            record = {
                "fields": dict(whole.fields),
                "gradients": gradients,
                "weights": _whole(job.whole_parameters()),
                "lr": done.lr,
                "state": {
                    name: whole_tensor(tensor.detach()).cpu().clone()
                    for name, (tensor, _) in optimizer_state(job).items()
                },
                "buffers": {name: b.detach().cpu().clone() for name, b in all_buffers(job).items()},
                "routing": {} if microbatches else routing_record(routed),
            }
            _store(record, folder, step)
            left_over = left_over or list(left_over_gradients(job, step))
            problems += recurrence.problems(step, batches, record, run.steps[step])
            if resolved.config.validation.enable and step in (1, steps):
                validated = validate_unchanged(job, problems)
                run.steps[step].validation = validated.loss
                run.steps[step].metrics = dict(validated.metrics)
                if step == 1:
                    problems += wrong_validation(job, validated.loss)
        run.problems = tuple(dict.fromkeys([*left_over, *problems]))
        return run


def run_plan(
    world: World,
    resolved: ResolvedJob,
    steps: int,
    folder: str,
    patch: Patch | None = None,
    microbatches: Microbatches | None = None,
    reloads: bool = False,
    replay: bool = False,
) -> RankRun:
    """Train the job for `steps` steps and measure this rank's part against the record in `folder`.

    With `microbatches`, which need one process, the batch is split into these instead of the job's
    own. With `reloads`, the job, which must have [checkpoint] enabled, is saved at its end and
    loaded into a new job, which is measured too. With `replay`, tokens go to the experts that the
    reference chose. Every rank of the world must call this.
    """
    calls_before = {call.group: call.number for call in recorded_calls()}
    with (patch or contextlib.nullcontext)(), open_job(world, resolved) as job:
        start = load(folder, 0)
        draw_zero_parameters(job, start["drawn"])
        # FSDP2 registers other tensors during a step.
        parameters, problems = job.parameters, list(optimizer_problems(job))
        placements = {name: placements_of(job, parameter) for name, parameter in parameters.items()}
        expected = {
            name: digest_of(same_part(start["weights"][name], parameter))
            for name, parameter in parameters.items()
            if name in start["weights"]
        }
        seen = [RankStep(weights=agreements(parameters, start["weights"], lambda p: p))]
        pending: tuple[str, ...] = ()
        left_over: list[str] = []
        for step in range(1, steps + 1):
            record = load(folder, step)
            batches = job.draw()
            found = RankStep(**look_at_data(job, join(batches), record["fields"]))

            def look(found: RankStep = found, expected: Any = record["gradients"]) -> None:
                nonlocal pending
                found.gradients = agreements(parameters, expected, lambda p: p.grad)
                pending = pending or tuple(
                    name for name, parameter in parameters.items() if is_pending(parameter.grad)
                )

            batches = leave_out_targets(job, batches, record["fields"])
            batches = cut_again(batches, microbatches)
            with (
                naming_failures(job, every=True) if step == 1 else contextlib.nullcontext(),
                followed_routing(job, batches, record["routing"], replay=replay) as moved,
            ):
                done = job.trainer.step(batches, on_gradients=look)
            found.moved = moved
            if step == 1:
                problems += wrong_reductions(job, calls_before)
                problems += [
                    f"{name} requires a gradient on one process, but not under the plan"
                    for name, parameter in parameters.items()
                    if name in record["gradients"] and not parameter.requires_grad
                ]
                problems += [
                    f"{name} is frozen on one process, but has a gradient under the plan"
                    for name, agreement in found.gradients.items()
                    if name not in record["gradients"]
                ]
            left_over = left_over or list(left_over_gradients(job, step))
            found.loss, found.num_targets = done.loss, done.num_targets
            found.norm, found.lr = done.grad_norm, done.lr
            found.loads, found.auxiliary_loss = loads_of(job), done.auxiliary_loss
            found.weights = agreements(parameters, record["weights"], lambda p: p)
            problems += [
                f"step {step} changes the frozen weight {name}"
                for name, parameter in parameters.items()
                if not parameter.requires_grad and found.weights[name].error > 0
            ]
            found.state = state_agreements(job, record)
            found.buffers = {
                name: agreement_of(buffer, buffer, record["buffers"].get(name))
                for name, buffer in all_buffers(job).items()
            }
            if resolved.config.validation.enable and step in (1, steps):
                validated = validate_unchanged(job, problems)
                found.validation, found.metrics = validated.loss, dict(validated.metrics)
            seen.append(found)
        reloaded, resume_problems = None, list[str]()
        if reloads:
            try:
                reloaded = _save_and_load(job, steps, record, resume_problems)
            except TitanliteError as error:
                resume_problems.append(f"the plan's checkpoint cannot be saved and loaded: {error}")
        return RankRun(
            world.rank,
            job.dims.coordinates(world.rank),
            placements,
            pending,
            expected,
            seen,
            (*problems, *left_over),
            tuple(resume_problems),
            reloaded,
        )


def check_formats(world: World, resolved: ResolvedJob, patch: Patch | None) -> tuple[str, ...]:
    """One step in the job's own number formats: sentences about tensors in other formats."""
    calls_before = {call.group: call.number for call in recorded_calls()}
    with (patch or contextlib.nullcontext)(), open_job(world, resolved) as job:
        job.trainer.step(job.draw())
        return (*wrong_formats(job), *wrong_reductions(job, calls_before))


@contextlib.contextmanager
def _half_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Packed:
    """Named tensors, joined by dtype: reading a file takes time for each tensor in it."""

    shapes: dict[str, tuple[torch.dtype, torch.Size]]
    joined: dict[torch.dtype, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _Packed:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors.values():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        return cls(
            {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
            {dtype: torch.cat(parts) for dtype, parts in by_dtype.items()},
        )

    def tensors(self) -> dict[str, Tensor]:
        parts = {
            dtype: iter(
                joined.split([shape.numel() for own, shape in self.shapes.values() if own == dtype])
            )
            for dtype, joined in self.joined.items()
        }
        return {
            name: next(parts[dtype]).view(shape) for name, (dtype, shape) in self.shapes.items()
        }


def _is_named_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, Tensor) for one in value.values())


def _store(record: Mapping[str, Any], folder: str, step: int) -> None:
    """Write the reference's record of a step. The file appears when it is complete."""
    file = step_file(folder, step)
    packed = {
        key: _Packed.of(value) if _is_named_tensors(value) else value
        for key, value in record.items()
    }
    torch.save(packed, file.with_suffix(".part"))
    os.replace(file.with_suffix(".part"), file)


def _saved_file(resolved: ResolvedJob) -> Path:
    """The file that appears when the checkpoint of the job's last step is complete."""
    return Path(resolved.config.job.dump_folder) / "saved"


def _wait_for(file: Path) -> None:
    """Wait until `file` exists. If its writer fails, the launcher of both ends this process."""
    while not file.exists():
        time.sleep(WAIT_SECONDS)


def load(folder: str, step: int) -> Any:
    """The reference's record of a step, its tensors mapped from the file.

    Waits for the reference if it has not completed the step.
    """
    _wait_for(step_file(folder, step))
    # This program wrote the file, in a folder that only its user can write to. torch's restricted
    # unpickler is written in Python and takes a tenth of a small verification.
    record = torch.load(step_file(folder, step), mmap=True, weights_only=False)
    return {
        key: value.tensors() if isinstance(value, _Packed) else value
        for key, value in record.items()
    }


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


def _whole(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: whole.detach().cpu().clone() for name, whole in tensors}


def _save_and_load(job: Job, step: int, record: Any, problems: list[str]) -> RankStep:
    """Save the job, load it into a new one, and compare that with the `record` of `step`."""
    from titanlite.checkpoint.run import Checkpoints

    with Checkpoints(job) as checkpoints:
        checkpoints.save(step, in_background=True)
        schedule, position = _schedule_of(job), job.sampler.state
        if job.config.checkpoint.async_mode != "disabled":
            # Train on while the checkpoint is written: this must not change what is saved.
            job.trainer.step(job.draw())
    if job.world.is_first:
        _saved_file(job.resolved).touch()
    again = build_job(job.resolved, job.world)
    with Checkpoints(again) as checkpoints:
        if checkpoints.first_step != step + 1:
            problems.append(
                f"a run resumed from the checkpoint of step {step} continues at step "
                f"{checkpoints.first_step}, not {step + 1}"
            )
    if again.sampler.state != position:
        problems.append(
            f"a run resumed from the checkpoint reads sample {again.sampler.state} next, not "
            f"{position}"
        )
    after = _schedule_of(again)
    for what, value in schedule.items():
        if value != after[what]:
            problems.append(
                f"a run resumed from the checkpoint has {what} {after[what]}, not {value}"
            )
    return _loaded(again, record)


def resume_alone(world: World, resolved: ResolvedJob, step: int, folder: str) -> RankStep:
    """Load a plan's checkpoint on one process and compare it with the reference's `step`.

    Waits until the plan has saved it. If ranks store shards in each other's place, they load them
    back correctly; one process does not.
    """
    from titanlite.checkpoint.run import Checkpoints

    with open_job(world, resolved) as job:
        _wait_for(_saved_file(resolved))
        with Checkpoints(job):
            pass
        return _loaded(job, load(folder, step))


def _loaded(job: Job, record: Any) -> RankStep:
    return RankStep(
        weights=agreements(job.parameters, record["weights"], lambda p: p),
        state=state_agreements(job, record),
        buffers={
            name: agreement_of(buffer, buffer, record["buffers"].get(name))
            for name, buffer in job.buffers.items()
        },
    )


def _schedule_of(job: Job) -> dict[str, Any]:
    trainer = job.trainer
    return {
        "the learning rates": [group["lr"] for group in trainer.optimizer.param_groups],
        "the schedule's step": trainer.scheduler.last_epoch,
        "the dtypes of its state": sorted({str(t.dtype) for t, _ in optimizer_state(job).values()}),
    }
