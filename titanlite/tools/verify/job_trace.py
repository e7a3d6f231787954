"""On a rank: runs the first differing step again with detailed recording.

trace_reference   records every module's output, and the gradient of each cell (cells.py)
trace_plan        compares this rank's outputs with them, and its gradients with sums of cells
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.config import ResolvedJob
from titanlite.job import Job
from titanlite.modules.batch import Batch, has_own_inputs, join, takes
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part
from titanlite.observe.failing import styles_of
from titanlite.parallelize.float8.linear import Float8Linear
from titanlite.ranks.world import World
from titanlite.registry import is_over_batch
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.cells import cells_file, cells_of, cut_cells, shares_of
from titanlite.tools.verify.inspect_model import unchanged_buffers
from titanlite.tools.verify.jobs import Microbatches, Patch, microbatches_of
from titanlite.tools.verify.opened import open_job, subject_of
from titanlite.tools.verify.outputs import Outputs
from titanlite.tools.verify.parts import ExpectedPart, label_dimensions
from titanlite.tools.verify.record import (
    Agreement,
    ModuleOutput,
    RankTrace,
    ReferenceTrace,
    module_of,
)
from titanlite.tools.verify.routing import compare_routing, recorded_routing, routing_record
from titanlite.tools.verify.run import draw_zero_parameters, loads_of
from titanlite.tools.verify.sequences import cut_again, leave_out_targets, places_in, sequences_of
from titanlite.tools.verify.step_files import load
from titanlite.tools.verify.subject import Subject
from titanlite.tools.verify.tracing import TOLERANCES, compare_outputs, sum_gradients, sum_outputs

# Outputs and cells' gradients are kept up to these totals.
MOST_OUTPUT_BYTES, MOST_CELL_BYTES = 2 << 30, 1 << 30


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
        with (
            subject_of(job).recorded() as kept,
            _scales_of(job) as scaled,
            recorded_routing(job) as routed,
        ):
            if evaluates:
                job.trainer.evaluate(batches)
            else:
                job.trainer.compute_gradients(batches)
        experts = loads_of(job)
        job.trainer.optimizer.zero_grad(set_to_none=True)
        outputs, gradients_of = {}, {}
        chosen, num_left_out = kept.up_to(MOST_OUTPUT_BYTES)
        for name, calls in chosen.items():
            batch_dim, _ = labels.get(module_of(name), (None, None))
            outputs[name] = _whole(calls, batch_dim, None if evaluates else microbatches)
            of_outputs = kept.gradients_of(name)
            # Without a dimension of sequences each rank or microbatch has only a share of it.
            if of_outputs is not None and batch_dim is not None:
                gradients_of[name] = _whole(of_outputs, batch_dim, microbatches)
        fields = dict(join(batches).to(torch.device("cpu")).fields)
        record: dict[str, Any] = {"outputs": outputs, "gradients": gradients_of, "labels": labels}
        record["fields"] = fields
        if microbatches is None and not evaluates:
            record["routing"] = routing_record(routed)
        torch.save(record, _trace_file(folder))

        batch = join(batches)
        # Cells need the sequences in the order of the global batch.
        if microbatches is not None and not evaluates:
            places = places_in(microbatches).tolist()
            batch = join([batch.rows(place, place + 1) for place in places])
        # A loss over the whole batch is not a sum over cells.
        is_one = evaluates or is_over_batch(plan.config.training.loss)
        cells = () if is_one else cells_of(plan)
        targets, gradients = [], defaultdict(list)
        names = _small_enough(job, names, len(cells))
        num_targets = max(1, int(batch.count_targets()))
        for own in cut_cells(batch, cells, plan) if cells else ():
            # The trainer divides by the targets of this cell, not of the step.
            job.trainer.compute_gradients([own])
            count = int(own.count_targets())
            targets.append(count)
            for name, gradient in job.whole_gradients():
                if name in names:
                    gradients[name].append(gradient.cpu() * (count / num_targets))
            job.trainer.optimizer.zero_grad(set_to_none=True)
        torch.save({n: torch.stack(g) for n, g in gradients.items()}, cells_file(folder))
        readers = {call: tuple(names) for call, names in kept.readers.items()}
        return ReferenceTrace(
            tuple(outputs), cells, tuple(targets), num_left_out, scaled, experts, readers
        )


def trace_plan(
    world: World,
    resolved: ResolvedJob,
    step: int,
    folder: str,
    names: list[str],
    modules: tuple[str, ...],
    patch: Patch | None = None,
    *,
    evaluates: bool = False,
) -> RankTrace:
    """Run `step` of the plan again and compare it with the reference's trace in `folder`, or with
    `evaluates` the first validation batch after the step.

    `names` are the gradients that differ, `modules` the reference's modules in forward order. Every
    rank of the world must call this.
    """
    with world.patched(patch), _at_step(world, resolved, step, folder) as (job, batches):
        if evaluates:
            job.trainer.step(batches)
            batches = list(itertools.islice(job.validation_batches(), 1))
        subject = subject_of(job)
        with subject.recorded() as kept, _scales_of(job) as scaled, recorded_routing(job) as routed:
            loss = None
            if evaluates:
                job.trainer.evaluate(batches)
            else:
                loss, _ = job.trainer.compute_gradients(batches)
        known = torch.load(_trace_file(folder), mmap=True, weights_only=True)
        record, before = load(folder, step)["gradients"], load(folder, step - 1)["weights"]
        own, sequences = ExpectedPart(job, batches), tuple[int, ...]()
        if evaluates:
            first = job.dims.data_rank(world.rank) * batches[0].num_sequences
            sequences = tuple(sequences_of(job, batches[0], known["fields"], first))

        def compare(
            call: str, calls: list[Tensor], whole: Tensor
        ) -> tuple[ModuleOutput, list[Tensor]]:
            labels = known["labels"].get(module_of(call), (None, None))
            output, parts = own.compare(calls, whole, labels)
            gradients = kept.gradients_of(call)
            if gradients is not None and call in known["gradients"]:
                of_gradient, _ = own.compare(gradients, known["gradients"][call], labels)
                if not of_gradient.shape:
                    output.gradient = of_gradient.agreement
            return output, parts

        found, expected = compare_outputs(kept, known["outputs"], compare)
        return RankTrace(
            rank=world.rank,
            coordinates=job.dims.coordinates(world.rank),
            modules=found,
            summed_gradients=_sum_gradients(job, subject, names, record),
            shares=shares_of(job, names, record, folder),
            pending_inputs=tuple(kept.pending_inputs),
            blind_stages=_blind_stages(job, kept, batches),
            styles=styles_of(job),
            scaled=scaled,
            experts=compare_routing(job, own, routed, known.get("routing", {}), record),
            sequences=sequences,
            idle=kept.idle,
            loss=loss,
            squares=sum(one.aa for one in subject.compare_gradients(record).values()),
            same_as=_equal_to_others(subject, names, record),
            **sum_outputs(subject, modules, found, kept.first, expected, before),
        )


def _equal_to_others(
    subject: Subject, names: list[str], known: Mapping[str, Tensor]
) -> dict[str, str]:
    """The gradients `names` of this rank that equal the reference's of another parameter."""
    same = {}
    for name in names:
        one = subject.held.get(name)
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


def _whole(calls: list[Tensor], batch_dim: int | None, microbatches: Microbatches | None) -> Tensor:
    """Join a module's outputs for all microbatches, in the order of the batch's sequences."""
    if batch_dim is None:
        return calls[0]
    whole, places = torch.cat(calls, batch_dim), places_in(microbatches or ())
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


def _blind_stages(job: Job, kept: Outputs, batches: list[Batch]) -> dict[int, str]:
    """This rank's stages that take positions and do not receive those of their tokens."""
    blind = {}
    for index, (stage, part) in enumerate(zip(job.stage_numbers, job.parts, strict=True)):
        if has_own_inputs(part) or not takes(part, "positions"):
            continue
        given = kept.positions[index]
        if any(positions is None for positions in given):
            blind[stage] = "missing"
        elif not all(any(_is_part(own, batch) for batch in batches) for own in given):
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


def _sum_gradients(
    job: Job, subject: Subject, names: list[str], known: Mapping[str, Tensor]
) -> dict[str, dict[str, Agreement]]:
    """Each wrong gradient summed over axes, and over the stages that have a copy of its weight."""
    sums, held = sum_gradients(subject, names, known), subject.held
    for name, of_axes in sums.items():
        if job.pipeline is None or name not in held or held[name].parameter.grad is None:
            continue
        summed = job.pipeline.copies.summed(name)
        if summed is not None:
            of_axes["pp"] = agreement(summed, held[name].part_of(known[name]), known[name])
    return sums
