"""On a rank of a job: finds the part of the reference's module output that its own should equal.

The reference is run on fewer sequences and on fewer tokens; the dimension that shrinks is the batch
or the token dimension. A rank's part is its sequences and its tokens, and its chunk over the tensor
axis in every dimension that is still smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.job import Job
from titanlite.modules.batch import Batch, call_model, join
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.outputs import recorded
from titanlite.tools.verify.record import ModuleOutput, module_of
from titanlite.tools.verify.tracing import TOLERANCES, compare_calls


def label_dimensions(model: nn.Module, batch: Batch) -> dict[str, tuple[int | None, ...]]:
    """Module -> (batch dimension, token dimension) of its output, found by trial runs."""
    # At least two sequences, since a batch norm has no variance of one value.
    three = join([batch.rows(0, 1)] * 3)
    dim = batch.dims[batch.input_name].sequence
    # Without a dimension of tokens no output changes its shape.
    half = three if dim is None else three.tokens_to(batch.input.size(dim) // 2)
    # A model that accepts only whole sequences gets no token dimension.
    whole, fewer, short = (
        first_outputs(model, some, may_fail=True) for some in (three, three.rows(0, 2), half)
    )

    def changed(name: str, other: Mapping[str, Tensor]) -> int | None:
        shape, others = whole[name].shape, other.get(name, whole[name]).shape
        if len(shape) != len(others):
            return None
        return next((dim for dim in range(len(shape)) if shape[dim] != others[dim]), None)

    return {name: (changed(name, fewer), changed(name, short)) for name in whole}


@torch.no_grad()
def first_outputs(model: nn.Module, batch: Batch, *, may_fail: bool = False) -> dict[str, Tensor]:
    """The output of every module's first call, in the order in which the calls end.

    With `may_fail`, those until the forward pass fails.
    """
    with recorded([model], [True]) as kept, contextlib.ExitStack() as exits:
        if may_fail:
            exits.enter_context(contextlib.suppress(Exception))
        call_model(model, batch)
    return {call: tensors[0] for call, tensors in kept.first.items() if module_of(call) == call}


@dataclass
class ExpectedPart:
    """Compares this rank's module outputs with its part of the reference's."""

    job: Job
    batches: list[Batch]

    def compare(
        self, calls: list[Tensor], whole: Tensor, labels: tuple[int | None, ...]
    ) -> tuple[ModuleOutput, list[Tensor]]:
        """Compare a module's outputs, in the order of its calls, with `whole`, the reference's.

        `labels` are its batch and token dimensions. Returns the expected parts, too.
        """
        num_sequences = sum(batch.num_sequences for batch in self.batches)
        first = self.job.dims.data_rank(self.job.world.rank) * num_sequences
        per_call = max(1, num_sequences // len(calls))
        tolerance = TOLERANCES.get(calls[0].dtype, 0.1)

        def rows(index: int) -> range:
            return range(first + index * per_call, first + (index + 1) * per_call)

        def ways(index: int, call: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            part = self._part(call, whole, labels, rows(index), self.job.held_positions)
            # An output of another shape is part of nothing.
            yield torch.zeros(0) if part is None else part, whole

        compared = compare_calls(calls, ways, tolerance)
        assert compared is not None
        found, parts = compared
        strange = [
            call for call, part in zip(calls, parts, strict=True) if call.shape != part.shape
        ]
        if strange:
            found.shape = f"{list(strange[-1].shape)}, not a shard of {list(whole.shape)}"
        elif found.wrong_calls and self.job.dims.cp_enabled and labels[1] is not None:
            index = found.wrong_calls[0]
            found.elsewhere = self._elsewhere(calls[index], whole, labels, rows(index), tolerance)
            jumps = (self.job.held_positions.diff() != 1).nonzero()
            before = int(jumps[0]) + 1 if len(jumps) else 0
            if before > 1:
                own, part = (t.narrow(labels[1], 0, before) for t in (calls[index], parts[index]))
                found.differs_from_jump = agreement(own, part, whole).difference < tolerance
        return found, parts

    def part_of_call(
        self, index: int, call: Tensor, whole: Tensor, labels: tuple[int, int]
    ) -> Tensor | None:
        """The part of `whole` that the output of a module's `index`-th call should equal.

        None if the output cannot be a part of it.
        """
        num_sequences = sum(batch.num_sequences for batch in self.batches)
        first = self.job.dims.data_rank(self.job.world.rank) * num_sequences
        size = call.size(labels[0])
        rows = range(first + index * size, first + (index + 1) * size)
        return self._part(call, whole, labels, rows, self.job.held_positions)

    def _part(
        self, call: Tensor, whole: Tensor, labels: tuple[int | None, ...], rows: range, held: Tensor
    ) -> Tensor | None:
        batch_dim, token_dim = labels
        if call.ndim != whole.ndim:
            return None
        part = whole
        if batch_dim is not None:
            part = part.narrow(batch_dim, rows.start, len(rows))
        if token_dim is not None:
            part = part.index_select(token_dim, held)
        dims = self.job.dims
        for dim in range(call.ndim):
            if call.size(dim) != part.size(dim):
                chunks = part.chunk(dims.tp, dim)
                place = dims.coordinates(self.job.world.rank)["tp"]
                if place >= len(chunks) or chunks[place].size(dim) != call.size(dim):
                    return None
                part = chunks[place]
        return part

    def _elsewhere(
        self,
        call: Tensor,
        whole: Tensor,
        labels: tuple[int | None, ...],
        rows: range,
        tolerance: float,
    ) -> str:
        """The tokens or positions for which the output would be correct; "" if there are none."""
        job, n = self.job, len(self.job.held_positions)
        candidates = {
            f"the tokens of cp rank {rank}": job.layout.positions(rank, job.resolved.seq_len)
            for rank in range(job.dims.cp)
        }
        candidates[f"positions 0 to {n - 1}"] = torch.arange(n)
        for words, held in candidates.items():
            part = self._part(call, whole, labels, rows, held)
            if part is not None and agreement(call, part, whole).difference < tolerance:
                return words
        return ""
