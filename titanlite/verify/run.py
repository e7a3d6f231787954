"""On a rank: the reference writes down what it computes, and a plan is measured against that.

The reference's tensors stand in one file a step, which every rank maps into memory. A rank
compares its own shards with its own slices, so that nothing is gathered, every replica is looked
at, and it is known on which ranks something differs.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from titanlite.batch import Batch, join
from titanlite.config import ResolvedJob
from titanlite.errors import TitanliteError
from titanlite.job import Job, build_job
from titanlite.mesh.parallel_dims import AXES, axes_where
from titanlite.names import canonical_name
from titanlite.ranks.account import recorded_calls
from titanlite.ranks.world import World
from titanlite.training.initialize import generator_for
from titanlite.training.shards import is_sharded, local_part, shard_of, whole_tensor
from titanlite.verify.failing import naming_failures
from titanlite.verify.formulas import (
    evaluate_unchanged,
    left_over_gradients,
    optimizer_problems,
    wrong_formats,
    wrong_reductions,
    wrong_validation,
)
from titanlite.verify.jobs import Microbatches, scheduled_lr
from titanlite.verify.narrow import find_narrowed
from titanlite.verify.record import Agreement, RankRun, RankStep, ReferenceRun, ReferenceStep
from titanlite.verify.recurrence import Recurrence, one_seed_for_all

Patch = Callable[[], AbstractContextManager[Any]]
"""Something to be in force while a plan is built and run, such as a bug to be found."""


def step_file(folder: str, step: int) -> Path:
    """Where the reference's record of `step` is; step 0 is the start."""
    return Path(folder) / f"step{step}.pt"


def run_reference(
    world: World,
    resolved: ResolvedJob,
    steps: int,
    folder: str,
    microbatches: Microbatches | None = None,
) -> ReferenceRun:
    """Train the job for `steps` steps on this one process and write each step into `folder`.

    A step's batch is taken in the `microbatches`, if given, else in the job's own.
    """
    with open_job(world, resolved) as job:
        drawn = draw_zero_matrices(job, None)
        torch.save(
            {"weights": _whole(job.whole_parameters()), "drawn": drawn}, step_file(folder, 0)
        )
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
            done = job.trainer.step(batches, on_gradients=keep)
            run.steps.append(
                ReferenceStep(
                    done.loss,
                    done.grad_norm,
                    scheduled_lr(resolved.config, step),
                    done.num_targets,
                )
            )
            record = {
                "fields": dict(whole.fields),
                "gradients": gradients,
                "weights": _whole(job.whole_parameters()),
                "lr": done.lr,
                "state": {
                    name: whole_tensor(tensor.detach()).cpu().clone()
                    for name, (tensor, _) in _state(job).items()
                },
                "buffers": {name: b.detach().cpu().clone() for name, b in _buffers(job).items()},
            }
            torch.save(record, step_file(folder, step))
            left_over = left_over or list(left_over_gradients(job, step))
            problems += recurrence.problems(step, batches, record, run.steps[step])
            if resolved.config.validation.enable and step in (1, steps):
                loss = evaluate_unchanged(job, problems)
                run.steps[step].validation = loss
                problems += wrong_validation(job, loss)
        run.problems = tuple(dict.fromkeys([*left_over, *problems]))
        return run


def run_plan(
    world: World,
    resolved: ResolvedJob,
    steps: int,
    folder: str,
    patch: Patch | None = None,
    microbatches: Microbatches | None = None,
    *,
    reloads: bool = False,
) -> RankRun:
    """Train the job for `steps` steps and measure this rank's part against the record in `folder`.

    One process takes the `microbatches`, where they are given, in place of the job's. Where it
    `reloads`, the job, whose [checkpoint] is enabled, is saved at its end and loaded into a new
    one, which is measured too. Every rank of the world must call this.
    """
    calls_before = {call.group: call.number for call in recorded_calls()}
    with (patch or contextlib.nullcontext)(), open_job(world, resolved) as job:
        start = load(folder, 0)
        draw_zero_matrices(job, start["drawn"])
        # FSDP2 registers other tensors in a step's course.
        parameters, problems = job.parameters, list(optimizer_problems(job))
        placements = {name: placements_of(job, parameter) for name, parameter in parameters.items()}
        expected = {
            name: _digest(_slice(start["weights"][name], parameter))
            for name, parameter in parameters.items()
            if name in start["weights"]
        }
        seen = [RankStep(weights=_agreements(parameters, start["weights"], lambda p: p))]
        pending: tuple[str, ...] = ()
        left_over: list[str] = []
        for step in range(1, steps + 1):
            record = load(folder, step)
            batches = job.draw()
            found = RankStep(**_look_at_data(job, join(batches), record["fields"]))

            def look(found: RankStep = found, expected: Any = record["gradients"]) -> None:
                nonlocal pending
                found.gradients = _agreements(parameters, expected, lambda p: p.grad)
                pending = pending or tuple(
                    name for name, parameter in parameters.items() if _is_pending(parameter.grad)
                )

            batches = leave_out_targets(job, batches, record["fields"])
            batches = cut_again(batches, microbatches)
            with naming_failures(job) if step == 1 else contextlib.nullcontext():
                done = job.trainer.step(batches, on_gradients=look)
            if step == 1:
                problems += wrong_reductions(job, calls_before)
                problems += [
                    f"{name} requires a gradient on one process and none under the plan"
                    for name, parameter in parameters.items()
                    if name in record["gradients"] and not parameter.requires_grad
                ]
            left_over = left_over or list(left_over_gradients(job, step))
            found.loss, found.num_targets = done.loss, done.num_targets
            found.norm, found.lr = done.grad_norm, done.lr
            found.weights = _agreements(parameters, record["weights"], lambda p: p)
            found.state = _state_agreements(job, record)
            found.buffers = {
                name: agreement_of(buffer, buffer, record["buffers"].get(name))
                for name, buffer in _buffers(job).items()
            }
            if resolved.config.validation.enable and step in (1, steps):
                found.validation = evaluate_unchanged(job, problems)
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
            (*left_over, *problems),
            tuple(resume_problems),
            reloaded,
        )


def run_and_reload(
    world: World,
    resolved: ResolvedJob,
    steps: int,
    folder: str,
    patch: Patch | None = None,
    microbatches: Microbatches | None = None,
) -> RankRun:
    """`run_plan`, and what it has saved loaded once more."""
    return run_plan(world, resolved, steps, folder, patch, microbatches, reloads=True)


def check_formats(world: World, resolved: ResolvedJob, patch: Patch | None) -> tuple[str, ...]:
    """What of one step in the job's own number formats is in others than the job asks for."""
    calls_before = {call.group: call.number for call in recorded_calls()}
    with (patch or contextlib.nullcontext)(), open_job(world, resolved) as job:
        job.trainer.step(job.draw())
        return (*wrong_formats(job), *wrong_reductions(job, calls_before))


@contextlib.contextmanager
def open_job(world: World, resolved: ResolvedJob) -> Iterator[Job]:
    """The job in a world that other jobs have been in, and in which others will be."""
    # Compiled code of the job before must not be found by this one's shapes.
    torch._dynamo.reset()
    # Ranks that are forked from one process share its random state, and ranks elsewhere do not:
    # what forgets to seed has to look as wrong here as it is there.
    seed = hash((world.rank, time.monotonic_ns())) % 2**32
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield build_job(resolved, world)
    finally:
        gc.collect()


def load(folder: str, step: int) -> Any:
    """The reference's record of a step, its tensors mapped from the file."""
    return torch.load(step_file(folder, step), mmap=True, weights_only=True)


@torch.no_grad()
def draw_zero_matrices(job: Job, names: list[str] | None) -> list[str]:
    """Draw the matrices that start at zero (`names`, or those found), and say which.

    Under a zero output layer every gradient below it is zero at the first step, and zero agrees
    with everything.
    """
    found = []
    for name, parameter in job.parameters.items():
        local = local_part(parameter)
        if name in names if names is not None else parameter.ndim > 1 and not local.any():
            whole = torch.empty(parameter.shape)
            whole.normal_(0.0, 0.02, generator=generator_for(job.config.debug.seed, name))
            local.copy_(shard_of(whole, parameter))
            found.append(name)
    return found


def leave_out_targets(
    job: Job, batches: list[Batch], known: Mapping[str, Tensor] | None = None
) -> list[Batch]:
    """The batches without the first i/2G of the targets of sequence i of G.

    So no two ranks, microbatches or stretches of the sequence have as many targets as each other,
    and an average of averages is not the average. Which sequence is which follows from the fields
    of the reference's batch, `known`, and without them from their order.
    """
    held, seq_len, total = job.held_positions, job.resolved.seq_len, job.resolved.global_batch_size
    first = _first_sequence(job)
    left = []
    for batch in batches:
        numbers = torch.arange(first, first + batch.num_sequences)
        if known is not None:
            found = torch.tensor(_sequences_of(job, batch, known, first))
            numbers = torch.where(found < 0, numbers, found)
        is_out = held[None] < (numbers * seq_len // (2 * total))[:, None]
        left.append(batch.leave_out(is_out))
        first += batch.num_sequences
    return left


def cut_again(batches: list[Batch], microbatches: Microbatches | None) -> list[Batch]:
    """One process's whole batch in other microbatches, where they are given."""
    if microbatches is None:
        return batches
    whole = join(batches)
    return [join([whole.rows(r.start, r.stop) for r in rows]) for rows in microbatches]


def _sequences_of(job: Job, own: Batch, known: Mapping[str, Tensor], first: int) -> list[int]:
    """Which sequences of the reference's batch these are, -1 for none; `first` as their order has.

    `known` are the fields of that batch, of which a rank holds some sequences and of each some
    tokens.
    """
    tokens, all_known = own.tokens.cpu(), known["tokens"][:, job.held_positions]
    numbers = []
    for row, number in enumerate(range(first, first + own.num_sequences)):
        if number < len(all_known) and torch.equal(tokens[row], all_known[number]):
            numbers.append(number)
            continue
        same = all_known[:0]
        if tokens.shape[1:] == all_known.shape[1:]:
            same = (all_known == tokens[row]).all(1).nonzero()
        numbers.append(int(same[0]) if len(same) else -1)
    return numbers


def _first_sequence(job: Job) -> int:
    """The place in the global batch of the first sequence that this rank reads."""
    rank = job.dims.data_rank(job.world.rank)
    return rank * job.resolved.global_batch_size // job.dims.dp


def _whole(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: whole.detach().cpu().clone() for name, whole in tensors}


def _look_at_data(job: Job, own: Batch, known: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which sequences this rank was given, and whether the rest of the batch goes with them."""
    own, held = own.to(torch.device("cpu")), job.held_positions
    sequences = _sequences_of(job, own, known, _first_sequence(job))
    known_targets = known["targets"][:, held]
    return {
        "sequences": tuple(sequences),
        "positions_agree": _positions_agree(own, known["positions"][..., held], sequences),
        "targets_agree": -1 in sequences or torch.equal(own.targets, known_targets[sequences]),
    }


def _positions_agree(own: Batch, expected: Tensor, sequences: list[int]) -> bool:
    """Whether this rank's positions are those of the reference, of the sequences that it read."""
    if own.dims["positions"].batch is None or expected.ndim == 1:
        return torch.equal(own.positions, expected)
    rows = [row for row, number in enumerate(sequences) if number != -1]
    return torch.equal(own.positions[rows], expected[[sequences[row] for row in rows]])


def _agreements(
    parameters: Mapping[str, nn.Parameter],
    reference: Mapping[str, Tensor],
    tensor_of: Callable[[nn.Parameter], Tensor | None],
) -> dict[str, Agreement]:
    found = {}
    for name, parameter in parameters.items():
        tensor = tensor_of(parameter)
        if tensor is not None and name in reference:
            whole = reference[name]
            found[name] = agreement(local_part(tensor.detach()), _slice(whole, parameter), whole)
        elif tensor is not None or name in reference:
            found[name] = Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "")
    return found


def _save_and_load(job: Job, step: int, record: Any, problems: list[str]) -> RankStep:
    """What a new job has of the reference's `record` of `step` that loads what this one saves."""
    from titanlite.checkpoint.run import Checkpoints

    with Checkpoints(job) as checkpoints:
        checkpoints.save(step, in_background=True)
        schedule, position = _schedule_of(job), job.sampler.state
        if job.config.checkpoint.async_mode != "disabled":
            # While it is written in the background, training changes what was to be saved.
            job.trainer.step(job.draw())
    again = build_job(job.resolved, job.world)
    with Checkpoints(again) as checkpoints:
        if checkpoints.first_step != step + 1:
            problems.append(
                f"a checkpoint of step {step} is gone on from at step {checkpoints.first_step}"
            )
    if again.sampler.state != position:
        problems.append(
            f"a run that goes on from a checkpoint reads sample {again.sampler.state} next, not "
            f"{position}"
        )
    after = _schedule_of(again)
    for what, value in schedule.items():
        if value != after[what]:
            problems.append(
                f"a run that resumes from the checkpoint has {what} {after[what]}, not {value}"
            )
    return _loaded(again, record)


def resume_alone(world: World, resolved: ResolvedJob, step: int, folder: str) -> RankStep:
    """What one process has of the reference's `step` that loads a plan's checkpoint.

    Shards that are stored in each other's place look right to the ranks that stored them.
    """
    from titanlite.checkpoint.run import Checkpoints

    with open_job(world, resolved) as job:
        with Checkpoints(job):
            pass
        return _loaded(job, load(folder, step))


def _loaded(job: Job, record: Any) -> RankStep:
    return RankStep(
        weights=_agreements(job.parameters, record["weights"], lambda p: p),
        state=_state_agreements(job, record),
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
        "the dtypes of its state": sorted({str(t.dtype) for t, _ in _state(job).values()}),
    }


def _state_agreements(job: Job, record: Any) -> dict[str, Agreement]:
    """What the optimizer keeps beside what the reference's keeps; what is lacking too."""
    own, known = _state(job), record["state"]
    found = {
        name: agreement_of(tensor, like, known.get(name)) for name, (tensor, like) in own.items()
    }
    names = tuple(f"{name}." for name in job.parameters)
    for name in known.keys() - own.keys():
        if name.startswith(names):
            found[name] = Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "")
    return found


def agreement_of(tensor: Tensor, like: Tensor, known: Tensor | None) -> Agreement:
    """How this rank's part of a tensor agrees with the reference's; `like` says how it is cut."""
    if known is None:
        return Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "")
    return agreement(local_part(tensor.detach()), _slice(known, like), known)


def _state(job: Job) -> dict[str, tuple[Tensor, Tensor]]:
    """What the optimizer keeps: "name.key" -> the tensor, and what it is cut as."""
    state = job.trainer.optimizer.state
    return {
        f"{name}.{key}": (value, parameter if value.shape == parameter.shape else value)
        for name, parameter in job.parameters.items()
        for key, value in state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _buffers(job: Job) -> dict[str, Tensor]:
    """All buffers of this rank's parts, those too that no checkpoint has."""
    return {
        canonical_name(name): buffer for part in job.parts for name, buffer in part.named_buffers()
    }


def _slice(whole: Tensor, parameter: Tensor) -> Tensor:
    return shard_of(whole, parameter) if whole.shape == parameter.shape else whole


def agreement(own: Tensor, expected: Tensor, whole: Tensor) -> Agreement:
    """How `own`, a rank's part, agrees with the same part of the reference's `whole`."""
    digest = _digest(own)
    scale = whole.double().abs().max().item() if whole.numel() else 0.0
    if own.shape != expected.shape:
        return Agreement(math.inf, scale, 0.0, 0.0, 0.0, digest)
    a, b = own.cpu().double().flatten(), expected.double().flatten()
    error = (a - b).abs().max().item() if a.numel() else 0.0
    if math.isnan(error):
        error = math.inf
    return Agreement(error, scale, (a @ a).item(), (a @ b).item(), (b @ b).item(), digest)


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()


def _is_pending(grad: Tensor | None) -> bool:
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


def _axes_of(mesh_dim_name: str) -> list[str]:
    """The axes in a mesh dimension's name, without the library's own answer, which may be wrong."""
    return [axis for axis in AXES if f"_{axis}_" in f"_{mesh_dim_name}_"]


def placements_of(job: Job, parameter: Tensor) -> dict[str, str]:
    """Mesh axis -> how the parameter lies on it, for the axes that have more than one rank."""
    stages = axes_where(weights="stages")
    used = {axis: "replicated" for axis in job.dims.axes_in_use if axis not in stages}
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if is_sharded(placement):
                kind = "strided" if isinstance(placement, _StridedShard) else "sharded"
                for axis in _axes_of(name):
                    if axis in used:
                        used[axis] = kind
    return used
