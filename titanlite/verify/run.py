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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from titanlite.batch import Batch, join
from titanlite.config import ResolvedJob
from titanlite.job import Job, build_job
from titanlite.mesh.parallel_dims import axes_of, axes_where
from titanlite.ranks.world import World
from titanlite.training.initialize import generator_for
from titanlite.training.shards import is_sharded, local_part, shard_of
from titanlite.verify.record import Agreement, RankRun, RankStep, ReferenceStep

Patch = Callable[[], AbstractContextManager[Any]]
"""Something to be in force while a plan is built and run, such as a bug to be found."""


def step_file(folder: str, step: int) -> Path:
    """Where the reference's record of `step` is; step 0 is the start."""
    return Path(folder) / f"step{step}.pt"


def run_reference(
    world: World, resolved: ResolvedJob, steps: int, folder: str
) -> list[ReferenceStep]:
    """Train the job for `steps` steps on this one process and write each step into `folder`."""
    with open_job(world, resolved) as job:
        drawn = draw_zero_matrices(job, None)
        torch.save(
            {"weights": _whole(job.whole_parameters()), "drawn": drawn}, step_file(folder, 0)
        )
        numbers = [ReferenceStep()]
        for step in range(1, steps + 1):
            batches = job.draw()
            whole = join(batches).to(torch.device("cpu"))
            gradients: dict[str, Tensor] = {}

            def keep(gradients: dict[str, Tensor] = gradients) -> None:
                gradients.update(_whole(job.whole_gradients()))

            done = job.trainer.step(leave_out_targets(job, batches), on_gradients=keep)
            numbers.append(ReferenceStep(done.loss, done.grad_norm, done.lr, done.num_targets))
            record = {
                "fields": dict(whole.fields),
                "gradients": gradients,
                "weights": _whole(job.whole_parameters()),
            }
            torch.save(record, step_file(folder, step))
        return numbers


def run_plan(
    world: World, resolved: ResolvedJob, steps: int, folder: str, patch: Patch | None = None
) -> RankRun:
    """Train the job for `steps` steps and measure this rank's part against the record in `folder`.

    Every rank of the world must call this.
    """
    with (patch or contextlib.nullcontext)(), open_job(world, resolved) as job:
        start = load(folder, 0)
        draw_zero_matrices(job, start["drawn"])
        parameters = job.parameters
        placements = {name: placements_of(job, parameter) for name, parameter in parameters.items()}
        expected = {
            name: _digest(_slice(start["weights"][name], parameter))
            for name, parameter in parameters.items()
            if name in start["weights"]
        }
        seen = [RankStep(weights=_agreements(parameters, start["weights"], lambda p: p))]
        pending: tuple[str, ...] = ()
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

            done = job.trainer.step(leave_out_targets(job, batches), on_gradients=look)
            found.loss, found.num_targets = done.loss, done.num_targets
            found.norm, found.lr = done.grad_norm, done.lr
            found.weights = _agreements(parameters, record["weights"], lambda p: p)
            seen.append(found)
        return RankRun(
            world.rank, job.dims.coordinates(world.rank), placements, pending, expected, seen
        )


@contextlib.contextmanager
def open_job(world: World, resolved: ResolvedJob) -> Iterator[Job]:
    """The job in a world that other jobs have been in, and in which others will be."""
    # Compiled code of the job before must not be found by this one's shapes.
    torch._dynamo.reset()
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


def leave_out_targets(job: Job, batches: list[Batch]) -> list[Batch]:
    """The batches without the first i/2G of the targets of sequence i of G.

    So no two ranks, microbatches or stretches of the sequence have as many targets as each other,
    and an average of averages is not the average.
    """
    held, seq_len = job.held_positions, job.resolved.seq_len
    first, total = _first_sequence(job), job.resolved.global_batch_size
    left = []
    for batch in batches:
        numbers = torch.arange(first, first + batch.num_sequences)
        is_out = held[None] < (numbers * seq_len // (2 * total))[:, None]
        left.append(batch.leave_out(is_out))
        first += batch.num_sequences
    return left


def _first_sequence(job: Job) -> int:
    """The place in the global batch of the first sequence that this rank reads."""
    rank = job.dims.data_rank(job.world.rank)
    return rank * job.resolved.global_batch_size // job.dims.dp


def _whole(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: whole.detach().cpu().clone() for name, whole in tensors}


def _look_at_data(job: Job, own: Batch, known: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which sequences this rank was given, and whether the rest of the batch goes with them.

    `known` are the fields of the reference's batch, of which a rank holds some sequences and of
    each some tokens.
    """
    own, held = own.to(torch.device("cpu")), job.held_positions
    known_tokens, known_targets = known["tokens"][:, held], known["targets"][:, held]
    first = _first_sequence(job)
    sequences = []
    for row, number in enumerate(range(first, first + own.num_sequences)):
        tokens = own.tokens[row]
        if number < len(known_tokens) and torch.equal(tokens, known_tokens[number]):
            sequences.append(number)
        else:
            same = known_tokens[:0]
            if tokens.shape == known_tokens.shape[1:]:
                same = (known_tokens == tokens).all(1).nonzero()
            sequences.append(int(same[0]) if len(same) else -1)
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


def placements_of(job: Job, parameter: Tensor) -> dict[str, str]:
    """Mesh axis -> how the parameter lies on it, for the axes that have more than one rank."""
    stages = axes_where(weights="stages")
    used = {axis: "replicated" for axis in job.dims.axes_in_use if axis not in stages}
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if is_sharded(placement):
                kind = "strided" if isinstance(placement, _StridedShard) else "sharded"
                for axis in axes_of(name):
                    if axis in used:
                        used[axis] = kind
    return used
