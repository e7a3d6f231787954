"""On a rank: runs the first differing step again with detailed recording.

trace_reference   records what modules receive and return, and the gradient of each cell (cells.py)
trace_plan        compares this rank's with them, and its gradients with sums of cells
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.config import ResolvedJob
from titanlite.job import Job
from titanlite.modules.batch import Batch, call_model, has_own_inputs, join, takes
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part
from titanlite.observe.failing import styles_of
from titanlite.parallelize.float8.linear import Float8Linear
from titanlite.ranks.temporary import save_temporary
from titanlite.ranks.world import World
from titanlite.registry import is_over_batch
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.caller_lines import OF_PYTHON, PACKAGE
from titanlite.tools.verify.cells import cells_file, cells_of, cut_cells, shares_of
from titanlite.tools.verify.events import Events, OperatorWatch, tensors_of
from titanlite.tools.verify.inspect_model import unchanged_buffers
from titanlite.tools.verify.jobs import Microbatches, Patch, microbatches_of
from titanlite.tools.verify.opened import open_job, subject_of
from titanlite.tools.verify.parts import (
    UNKNOWN,
    ExpectedPart,
    Labels,
    label_dimensions,
    tolerance_of,
)
from titanlite.tools.verify.record import RankTrace, ReferenceTrace, first_call, is_input
from titanlite.tools.verify.routing import compare_routing, recorded_routing, routing_record
from titanlite.tools.verify.run import draw_zero_parameters, loads_of
from titanlite.tools.verify.sequences import cut_again, leave_out_targets, places_in, sequences_of
from titanlite.tools.verify.step_files import load
from titanlite.tools.verify.subject import Subject
from titanlite.tools.verify.tracing import TOLERANCES, Compared, Tracer

# Outputs and cells' gradients are kept up to these totals.
MOST_OUTPUT_BYTES, MOST_CELL_BYTES = 2 << 30, 1 << 30

# To a job, its model's code and what its features do to the model are the caller's.
OF_JOBS = ("models", "modules", "parallelize")
FOREIGN_TO_JOBS = (
    *OF_PYTHON,
    *(str(path) for path in PACKAGE.iterdir() if path.name not in OF_JOBS),
    str(PACKAGE / "parallelize/pipeline_parallel"),
)


def trace_reference(
    world: World,
    resolved: ResolvedJob,
    step: int,
    folder: str,
    plan: ResolvedJob,
    names: list[str],
    *,
    evaluates: bool = False,
) -> ReferenceTrace:
    """Record `step` of the reference in detail into `folder`, with the cells of `plan`.

    `names` are the parameters whose gradients are recorded for each cell. With `evaluates`, the
    first validation batch after the step is recorded instead.
    """
    microbatches = microbatches_of(plan)
    with _at_step(world, resolved, step, folder, microbatches) as (job, batches):
        if evaluates:
            job.trainer.step(batches)
            batches = _first_of_validation(job, plan)
        model = job.parts[0]
        with unchanged_buffers(model):
            labels = label_dimensions(model, batches[0])
        kept = Events(finds_flow=not evaluates, is_training=not evaluates)
        with (
            subject_of(job).recorded(kept),
            _scales_of(job) as scaled,
            recorded_routing(job) as routed,
        ):
            if evaluates:
                job.trainer.evaluate(batches)
            else:
                job.trainer.compute_gradients(batches)
        experts = loads_of(job)
        job.trainer.optimizer.zero_grad(set_to_none=True)
        outputs, gradients_of, batch = {}, {}, join(batches)
        places = torch.arange(batch.num_sequences)
        if microbatches is not None and not evaluates:
            places = places_in(microbatches, batch.num_sequences)
        chosen, num_left_out = kept.up_to(MOST_OUTPUT_BYTES)
        for event, calls in chosen.items():
            batch_dim, _ = labels.get(first_call(event), UNKNOWN)
            outputs[event] = [_whole(calls, batch_dim, places)]
            of_calls = kept.gradients_of(event)
            # Without a dimension of sequences each rank or microbatch has only a share of it.
            if of_calls is not None and batch_dim is not None:
                gradients_of[event] = [_whole(of_calls, batch_dim, places)]
        fields = dict(batch.to(torch.device("cpu")).fields)
        record: dict[str, Any] = {"outputs": outputs, "output_gradients": gradients_of}
        record |= {"labels": labels, "fields": fields}
        if microbatches is None and not evaluates:
            record["routing"] = routing_record(routed)
        save_temporary(record, _trace_file(folder))

        # Cells need the sequences in the order of the global batch.
        if microbatches is not None and not evaluates:
            batch = join([batch.rows(place, place + 1) for place in places.tolist()])
        # A loss over the whole batch is not a sum over cells.
        is_one = evaluates or is_over_batch(plan.config.training.loss)
        cells = () if is_one else cells_of(plan, batch.num_sequences)
        targets, gradients = [], defaultdict(list)
        names = _small_enough(job, names, len(cells))
        count_of, loss_of_parts = job.trainer.loss.count, None
        num_targets = float(count_of(batch)) or 1
        for own in cut_cells(batch, cells, plan) if cells else ():
            # The trainer divides by the targets of this cell, not of the step.
            job.trainer.compute_gradients([own])
            count = float(count_of(own))
            targets.append(int(count) if count.is_integer() else count)
            for name, gradient in job.whole_gradients():
                if name in names:
                    gradients[name].append(gradient.cpu() * (count / num_targets))
            job.trainer.optimizer.zero_grad(set_to_none=True)
        save_temporary({n: torch.stack(g) for n, g in gradients.items()}, cells_file(folder))
        if is_one and not evaluates:
            size = batch.num_sequences // plan.dims.dp
            starts = range(0, batch.num_sequences, size)
            parts = [batch.rows(start, start + size) for start in starts]
            totals = [float(job.trainer.loss.total(call_model(model, p), p)) for p in parts]
            loss_of_parts = sum(totals) / num_targets
        return ReferenceTrace(
            tuple(outputs),
            cells,
            tuple(targets),
            num_left_out,
            {event: tuple(sources) for event, sources in kept.flow.items()},
            frozenset(gradients_of),
            scaled,
            experts,
            loss_of_parts,
        )


def trace_plan(
    world: World,
    resolved: ResolvedJob,
    step: int,
    folder: str,
    names: list[str],
    reference: ReferenceTrace,
    patch: Patch | None = None,
    *,
    evaluates: bool = False,
) -> RankTrace:
    """Run `step` of the plan again and compare it with the reference's trace in `folder`, or with
    `evaluates` the first validation batch after the step.

    `names` are the gradients that differ. Every rank of the world must call this.
    """
    with (
        world.watch.patched(patch or contextlib.nullcontext),
        _at_step(world, resolved, step, folder) as (job, batches),
    ):
        if evaluates:
            job.trainer.step(batches)
            batches = list(itertools.islice(job.validation_batches(), 1))
        subject, kept = subject_of(job), Events(is_training=not evaluates)
        is_compiled = job.config.compile.enable
        with (
            subject.recorded(kept),
            _positions_of(job) as given,
            _scales_of(job) as scaled,
            recorded_routing(job) as routed,
            contextlib.nullcontext() if is_compiled else OperatorWatch(kept, FOREIGN_TO_JOBS),
        ):
            loss = None
            if evaluates:
                job.trainer.evaluate(batches)
            else:
                loss, _ = job.trainer.compute_gradients(batches)
        known = torch.load(_trace_file(folder), mmap=True, weights_only=True)
        known["gradients"] = record = load(folder, step)["gradients"]
        before, own = load(folder, step - 1)["weights"], ExpectedPart(job, batches)
        tracer = JobTracer(subject, world.rank, job.dims, reference, own, known["labels"], before)
        trace = tracer.trace(kept, known, names)
        if evaluates:
            first = job.dims.data_rank(world.rank) * batches[0].num_sequences
            trace.sequences = tuple(sequences_of(job, batches[0], known["fields"], first))
        _sum_copies(job, trace, subject, record)
        trace.shares = shares_of(job, names, record, folder)
        trace.blind_stages = _blind_stages(job, given, batches)
        trace.styles, trace.scaled, trace.loss = styles_of(job), scaled, loss
        trace.experts = compare_routing(job, own, routed, known.get("routing", {}), record)
        trace.squares = sum(one.aa for one in subject.compare_gradients(record).values())
        trace.same_as = _equal_to_others(subject, names, record)
        return trace


@dataclass
class JobTracer(Tracer):
    """Compares a rank of a job, of which the parts are known."""

    own: ExpectedPart
    labels: Mapping[str, Labels]
    before: Mapping[str, Tensor]
    """The weights before the step."""

    def compare(self, event: str, calls: list[Tensor], known: list[Tensor]) -> Compared | None:
        """A tensor compared with the rank's part; None for an input of another shape."""
        labels = self.labels.get(first_call(event), UNKNOWN)
        found, selects = self.own.compare(calls, known[0], labels)
        return None if found.shape and is_input(event) else (found, selects)

    def leaves_out(self, event: str) -> bool:
        """Without a backward pass it is not known what an input is computed from."""
        return is_input(event) and not self.reference.flow

    def tolerance_of(self, tensor: Tensor) -> float:
        return tolerance_of(tensor)

    def weights(self) -> Mapping[str, Tensor]:
        """The reference's."""
        return self.before


def _equal_to_others(
    subject: Subject, names: list[str], known: Mapping[str, Tensor]
) -> dict[str, str]:
    """The gradients `names` of this rank that equal the reference's of another parameter."""
    same = {}
    for name in names:
        one = subject.local.get(name)
        if one is None or (own := one.parameter.grad) is None:
            continue
        local = local_part(own.detach())
        for other, whole in known.items():
            if other != name and whole.shape == one.shape and whole.any():
                found = agreement(local, one.part_of(whole, own), whole)
                if found.difference < TOLERANCES[torch.float64]:
                    same[name] = other
    return same


def _small_enough(job: Job, names: list[str], num_cells: int) -> list[str]:
    """The smallest parameters whose gradients, once per cell, fit into MOST_CELL_BYTES."""
    sizes = {name: parameter.numel() for name, parameter in job.parameters.items()}
    chosen, num_bytes = [], 0
    for name in sorted(names, key=lambda name: sizes.get(name, 0)):
        num_bytes += sizes.get(name, 0) * num_cells * 8
        if num_bytes <= MOST_CELL_BYTES:
            chosen.append(name)
    return chosen


def _trace_file(folder: str) -> Path:
    return Path(folder) / "trace.pt"


@contextlib.contextmanager
def _at_step(
    world: World,
    resolved: ResolvedJob,
    step: int,
    folder: str,
    microbatches: Microbatches | None = None,
) -> Iterator[tuple[Job, list[Batch]]]:
    """The job just before `step`, and the batches of that step."""

    def draw(number: int) -> list[Batch]:
        batches = leave_out_targets(job, job.draw(), load(folder, number)["fields"])
        return cut_again(batches, microbatches)

    with open_job(world, resolved) as job:
        draw_zero_parameters(job, load(folder, 0)["drawn"])
        for number in range(1, step):
            job.trainer.step(draw(number))
            if number == 1 and resolved.config.validation.enable:
                # It may leave something behind.
                job.validate()
        yield job, draw(step)


def _first_of_validation(job: Job, plan: ResolvedJob) -> list[Batch]:
    """The samples that all ranks of `plan` evaluate first, as one batch."""
    number = plan.dims.dp * plan.config.validation.local_batch_size
    batches = list(job.validation_batches())
    whole = join(batches)
    return [whole.rows(0, min(number, whole.num_sequences))]


def _whole(calls: list[Tensor], batch_dim: int | None, places: Tensor) -> Tensor:
    """Join a module's outputs for all microbatches, in the order of the batch's sequences."""
    if batch_dim is None:
        return calls[0]
    whole = torch.cat(calls, batch_dim)
    return whole.index_select(batch_dim, places) if whole.size(batch_dim) == len(places) else whole


@contextlib.contextmanager
def _scales_of(job: Job) -> Iterator[dict[str, tuple[bool, dict[str, float]]]]:
    """Inside, record the scales of each float8 layer; the dict is filled on exit."""
    layers = {
        canonical_name(name): module
        for part in job.parts
        for name, module in part.named_modules()
        if isinstance(module, Float8Linear)
    }
    found: dict[str, tuple[bool, dict[str, float]]] = {}
    for layer in layers.values():
        layer.observed = []
    try:
        yield found
    finally:
        for name, layer in layers.items():
            if layer.observed:
                _, is_rowwise, _ = layer.observed[0]
                largest: dict[str, float] = {}
                for what, _, amax in layer.observed:
                    largest[what] = max(largest.get(what, 0.0), amax)
                found[name] = is_rowwise, largest
            layer.observed = None


@contextlib.contextmanager
def _positions_of(job: Job) -> Iterator[list[list[Tensor | None]]]:
    """Inside, the positions that each part of the model receives are recorded."""
    given: list[list[Tensor | None]] = [[] for _ in job.parts]
    hooks = [
        part.register_forward_pre_hook(
            lambda part, args, kwargs, own=own: own.append(
                dict(tensors_of(part, args, kwargs)).get("positions")
            ),
            with_kwargs=True,
        )
        for part, own in zip(job.parts, given, strict=True)
    ]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def _blind_stages(
    job: Job, given: list[list[Tensor | None]], batches: list[Batch]
) -> dict[int, str]:
    """This rank's stages that take positions and do not receive those of their tokens."""
    blind = {}
    stages = zip(job.stage_numbers, job.parts, given, strict=True)
    for stage, part, positions in stages:
        if has_own_inputs(part) or not takes(part, "positions"):
            continue
        if any(own is None for own in positions):
            blind[stage] = "missing"
        elif not all(any(_is_part(own, batch) for batch in batches) for own in positions):
            blind[stage] = "wrong"
    return blind


def _is_part(own: Tensor | None, batch: Batch) -> bool:
    """Whether positions are those of a batch, or of consecutive sequences of it."""
    whole = batch.positions
    if own is None or own.ndim != whole.ndim or own.size(-1) != whole.size(-1):
        return False
    if batch.dims["positions"].batch is None:
        return torch.equal(own, whole)
    return any(torch.equal(own, part) for part in whole.unfold(0, len(own), 1).movedim(-1, 1))


def _sum_copies(job: Job, trace: RankTrace, subject: Subject, known: Mapping[str, Tensor]) -> None:
    """Sum wrong gradients also over the stages that have a copy of their weight."""
    local = subject.local
    for name, of_axes in trace.summed_gradients.items():
        if job.pipeline is None or name not in local or local[name].parameter.grad is None:
            continue
        summed = job.pipeline.copies.summed(name)
        if summed is not None:
            of_axes["pp"] = agreement(summed, local[name].part_of(known[name]), known[name])
