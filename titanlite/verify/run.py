"""On a rank: records the reference, and measures a plan against that record.

The reference's tensors are in one file per step, which every rank maps into memory. A rank compares
its own shards with its slices of these tensors. So nothing is gathered, every replica is checked,
and the ranks on which something differs are known.
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
"""A context manager that is entered while a plan is built and run, such as a bug to find."""


def step_file(folder: str, step: int) -> Path:
    """The file of the reference's record of `step`; step 0 is the start."""
    return Path(folder) / f"step{step}.pt"


def run_reference(
    world: World,
    resolved: ResolvedJob,
    steps: int,
    folder: str,
    microbatches: Microbatches | None = None,
) -> ReferenceRun:
    """Train the job for `steps` steps on one process and write a record of each into `folder`.

    With `microbatches`, a step's batch is split into these instead of the job's own.
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

    With `microbatches`, which need one process, the batch is split into these instead of the job's
    own. With `reloads`, the job, which must have [checkpoint] enabled, is saved at its end and
    loaded into a new job, which is measured too. Every rank of the world must call this.
    """
    calls_before = {call.group: call.number for call in recorded_calls()}
    with (patch or contextlib.nullcontext)(), open_job(world, resolved) as job:
        start = load(folder, 0)
        draw_zero_matrices(job, start["drawn"])
        # FSDP2 registers other tensors during a step.
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
                    f"{name} requires a gradient on one process, but not under the plan"
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
            (*problems, *left_over),
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
    """`run_plan` with `reloads`."""
    return run_plan(world, resolved, steps, folder, patch, microbatches, reloads=True)


def check_formats(world: World, resolved: ResolvedJob, patch: Patch | None) -> tuple[str, ...]:
    """One step in the job's own number formats: sentences about tensors in other formats."""
    calls_before = {call.group: call.number for call in recorded_calls()}
    with (patch or contextlib.nullcontext)(), open_job(world, resolved) as job:
        job.trainer.step(job.draw())
        return (*wrong_formats(job), *wrong_reductions(job, calls_before))


@contextlib.contextmanager
def open_job(world: World, resolved: ResolvedJob) -> Iterator[Job]:
    """Build the job in a world that is reused from job to job."""
    # Otherwise shapes of this job could find compiled code of the previous one.
    torch._dynamo.reset()
    # Ranks forked from one process share its random state; ranks on different machines do not. A
    # different seed on each rank makes missing seeds show up here too.
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
    """Draw random values for the matrices that start at zero; returns their names.

    These are the matrices in `names`, or if it is None all that are zero. Below a zero output layer
    every gradient of the first step is zero, and zero agrees with everything.
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
    """The batches with the first i/2G of the targets of sequence i of G masked.

    No two ranks, microbatches or parts of the sequence then have equally many targets, so that a
    mean of means differs from the mean. A sequence's index i is found by comparison with `known`,
    the fields of the reference's batch; without `known`, it follows from the order.
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
    """The batch of one process, split into `microbatches` if they are given."""
    if microbatches is None:
        return batches
    whole = join(batches)
    return [join([whole.rows(r.start, r.stop) for r in rows]) for rows in microbatches]


def _sequences_of(job: Job, own: Batch, known: Mapping[str, Tensor], first: int) -> list[int]:
    """The index in the reference's batch of each sequence of `own`, -1 for none.

    `known` are the fields of that batch; `first` is the index of the first sequence if the order is
    right. A rank may hold only some tokens of each sequence.
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
    """The index in the global batch of the first sequence that this rank should read."""
    rank = job.dims.data_rank(job.world.rank)
    return rank * job.resolved.global_batch_size // job.dims.dp


def _whole(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: whole.detach().cpu().clone() for name, whole in tensors}


def _look_at_data(job: Job, own: Batch, known: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which sequences this rank received, and whether positions and targets match them."""
    own, held = own.to(torch.device("cpu")), job.held_positions
    sequences = _sequences_of(job, own, known, _first_sequence(job))
    known_targets = known["targets"][:, held]
    return {
        "sequences": tuple(sequences),
        "positions_agree": _positions_agree(own, known["positions"][..., held], sequences),
        "targets_agree": -1 in sequences or torch.equal(own.targets, known_targets[sequences]),
    }


def _positions_agree(own: Batch, expected: Tensor, sequences: list[int]) -> bool:
    """Whether this rank's positions are the reference's for the sequences that it read."""
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
    """Save the job, load it into a new one, and compare that with the `record` of `step`."""
    from titanlite.checkpoint.run import Checkpoints

    with Checkpoints(job) as checkpoints:
        checkpoints.save(step, in_background=True)
        schedule, position = _schedule_of(job), job.sampler.state
        if job.config.checkpoint.async_mode != "disabled":
            # Train on while the checkpoint is written: this must not change what is saved.
            job.trainer.step(job.draw())
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

    If ranks store shards in each other's place, they load them back correctly; one process does
    not.
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
    """The optimizer state compared with the reference's; missing entries count as differing."""
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
    """This rank's part of a tensor compared with the reference's; `like` has its placements."""
    if known is None:
        return Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "")
    return agreement(local_part(tensor.detach()), _slice(known, like), known)


def _state(job: Job) -> dict[str, tuple[Tensor, Tensor]]:
    """The optimizer state: "name.key" -> (tensor, a tensor with its placements)."""
    state = job.trainer.optimizer.state
    return {
        f"{name}.{key}": (value, parameter if value.shape == parameter.shape else value)
        for name, parameter in job.parameters.items()
        for key, value in state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _buffers(job: Job) -> dict[str, Tensor]:
    """All buffers of this rank's parts of the model, non-persistent ones too."""
    return {
        canonical_name(name): buffer for part in job.parts for name, buffer in part.named_buffers()
    }


def _slice(whole: Tensor, parameter: Tensor) -> Tensor:
    return shard_of(whole, parameter) if whole.shape == parameter.shape else whole


def agreement(own: Tensor, expected: Tensor, whole: Tensor) -> Agreement:
    """`own`, a rank's part, compared with `expected`, the same part of the reference's `whole`."""
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
    """The axes in a mesh dimension's name, computed apart from `axes_of`, which may be wrong."""
    return [axis for axis in AXES if f"_{axis}_" in f"_{mesh_dim_name}_"]


def placements_of(job: Job, parameter: Tensor) -> dict[str, str]:
    """Mesh axis -> "replicated", "sharded" or "strided", for axes with more than one rank."""
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
