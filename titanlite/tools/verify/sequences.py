"""On a rank: which sequences of the reference's batch it received, and which targets count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titanlite.job import Job
from titanlite.modules.batch import Batch, join
from titanlite.tools.verify.jobs import Microbatches


def own_positions(job: Job) -> Tensor:
    """The positions in a sequence of this rank's tokens, int64 [T]."""
    seq_len = job.resolved.seq_len
    if not job.dims.cp_enabled:
        return torch.arange(seq_len)
    return job.layout.positions(job.dims.token_rank(job.world.rank), seq_len)


def leave_out_targets(
    job: Job, batches: list[Batch], known: Mapping[str, Tensor] | None = None
) -> list[Batch]:
    """The batches with the first i/2G of the targets of sequence i of G masked.

    If targets have no sequence dimension, those of i = 1, 4, 7, ... are masked. Otherwise no two
    ranks, microbatches or parts of the sequence have equally many targets left, so that a mean of
    means differs from the mean. A sequence's index i is found by comparison with `known`, the
    fields of the reference's batch; without `known`, it follows from the order.
    """
    here, seq_len = own_positions(job), job.resolved.seq_len
    own = sum(batch.num_sequences for batch in batches)
    first, total = _first_sequence(job, own), own * job.dims.dp
    left = []
    for batch in batches:
        numbers = torch.arange(first, first + batch.num_sequences)
        if known is not None:
            found = torch.tensor(sequences_of(job, batch, known, first))
            numbers = torch.where(found < 0, numbers, found)
        if batch.dims["targets"].sequence is None:
            is_out = (numbers % 3 == 1)[:, None]
        else:
            is_out = here[None] < (numbers * seq_len // (2 * total))[:, None]
        left.append(batch.leave_out(is_out))
        first += batch.num_sequences
    return left


def cut_again(batches: list[Batch], microbatches: Microbatches | None) -> list[Batch]:
    """The batch of one process, split into `microbatches` if they are given."""
    if microbatches is None:
        return batches
    whole = join(batches)
    of_whole = microbatches.of(whole.num_sequences)
    return [join([whole.rows(r.start, r.stop) for r in rows]) for rows in of_whole]


def places_in(microbatches: Microbatches, total: int) -> Tensor:
    """For each of the `total` sequences of a batch, its place in the joined microbatches."""
    of_batch = microbatches.of(total)
    return torch.tensor([number for m in of_batch for r in m for number in r]).argsort()


def sequences_of(job: Job, own: Batch, known: Mapping[str, Tensor], first: int) -> list[int]:
    """The index in the reference's batch of each sequence of `own`, -1 for none.

    `known` are the fields of that batch; `first` is the index of the first sequence if the order is
    right. A rank may hold only some tokens of each sequence.
    """
    rows, all_known = own.input.cpu(), _held(job, own, known, own.input_name)
    numbers = []
    for row, number in enumerate(range(first, first + own.num_sequences)):
        if number < len(all_known) and torch.equal(rows[row], all_known[number]):
            numbers.append(number)
            continue
        same = all_known[:0]
        if rows.shape[1:] == all_known.shape[1:]:
            same = (all_known == rows[row]).flatten(1).all(1).nonzero()
        numbers.append(int(same[0]) if len(same) else -1)
    return numbers


def _held(job: Job, own: Batch, known: Mapping[str, Tensor], name: str) -> Tensor:
    """A field of the reference's batch, at the positions of a sequence that this rank holds."""
    dim = own.dims[name].sequence
    return known[name] if dim is None else known[name].index_select(dim, own_positions(job))


def _first_sequence(job: Job, own: int) -> int:
    """The index in the global batch of the first of the `own` sequences of this rank."""
    return job.dims.data_rank(job.world.rank) * own


def look_at_data(job: Job, own: Batch, known: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which sequences this rank received, and whether positions and targets match them."""
    own = own.to(torch.device("cpu"))
    sequences = sequences_of(job, own, known, _first_sequence(job, own.num_sequences))
    known_targets = _held(job, own, known, "targets")
    has_positions = "positions" in own.fields
    return {
        "sequences": tuple(sequences),
        "positions_agree": not has_positions
        or _positions_agree(own, _held(job, own, known, "positions"), sequences),
        "targets_agree": -1 in sequences or torch.equal(own.targets, known_targets[sequences]),
    }


def _positions_agree(own: Batch, expected: Tensor, sequences: list[int]) -> bool:
    """Whether this rank's positions are the reference's for the sequences that it read."""
    if own.dims["positions"].batch is None or expected.ndim == 1:
        return torch.equal(own.positions, expected)
    rows = [row for row, number in enumerate(sequences) if number != -1]
    return torch.equal(own.positions[rows], expected[[sequences[row] for row in rows]])
