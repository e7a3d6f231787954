"""On a rank of a job: finds the part of the reference's tensor that its own should equal.

The reference is run on fewer sequences and on fewer tokens; the dimension of what a module receives
or returns that shrinks is the batch or the token dimension. A rank's part is its sequences and its
tokens, and its chunk over the tensor axis in every dimension that is still smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.job import Job
from titanlite.modules.batch import Batch, call_model, join
from titanlite.modules.names import unwrapped_name
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.events import Events, recorded
from titanlite.tools.verify.record import first_call
from titanlite.tools.verify.sequences import own_positions
from titanlite.tools.verify.tracing import TOLERANCES, Compared, Select, in_all

Labels = tuple[int | None, ...]
"""The batch and the token dimension of a tensor; None for none."""
UNKNOWN = None, None


def label_dimensions(model: nn.Module, batch: Batch) -> dict[str, Labels]:
    """The labels of what modules receive and return in their first call, found by trial runs."""
    # At least two sequences, since a batch norm has no variance of one value.
    three = join([batch.rows(0, 1)] * 3)
    dim = batch.dims[batch.input_name].sequence
    # Without a dimension of tokens no output changes its shape.
    half = three if dim is None else three.tokens_to(batch.input.size(dim) // 2)
    # A model that accepts only whole sequences gets no token dimension.
    whole, fewer, short = (
        first_tensors(model, some, may_fail=True) for some in (three, three.rows(0, 2), half)
    )

    def changed(name: str, other: Mapping[str, Tensor]) -> int | None:
        shape, others = whole[name].shape, other.get(name, whole[name]).shape
        if len(shape) != len(others):
            return None
        return next((dim for dim in range(len(shape)) if shape[dim] != others[dim]), None)

    return {name: (changed(name, fewer), changed(name, short)) for name in whole}


@torch.no_grad()
def first_tensors(model: nn.Module, batch: Batch, *, may_fail: bool = False) -> dict[str, Tensor]:
    """What every module receives and returns in its first call, in forward order.

    With `may_fail`, until the forward pass fails.
    """
    kept = Events(is_training=False)
    with recorded([model], [True], unwrapped_name, kept), contextlib.ExitStack() as exits:
        if may_fail:
            exits.enter_context(contextlib.suppress(Exception))
        call_model(model, batch)
    return {event: own[0] for event, own in kept.first.items() if event == first_call(event)}


def tolerance_of(tensor: Tensor) -> float:
    """The largest difference of a tensor that agrees."""
    return TOLERANCES.get(tensor.dtype, 0.1 if tensor.is_floating_point() else 0.0)


@dataclass
class ExpectedPart:
    """This rank's parts of the reference's tensors."""

    job: Job
    batches: list[Batch]

    def compare(self, calls: list[Tensor], whole: Tensor, labels: Labels) -> Compared:
        """Compare a tensor, in the order of its calls, with `whole`, the reference's."""
        here = own_positions(self.job)
        selects = [self.select(i, call, len(calls), labels) for i, call in enumerate(calls)]
        parts = [select(whole) for select in selects]
        tolerance = tolerance_of(calls[0])
        fits = [agreement(call, part, whole) for call, part in zip(calls, parts, strict=True)]
        found = in_all(fits, [i for i, one in enumerate(fits) if not one.difference <= tolerance])
        strange = [
            call for call, part in zip(calls, parts, strict=True) if call.shape != part.shape
        ]
        if strange:
            found.shape = f"{list(strange[-1].shape)}, not a shard of {list(whole.shape)}"
        elif found.wrong_calls and self.job.dims.cp_enabled and labels[1] is not None:
            index = found.wrong_calls[0]
            rows = self._rows(index, len(calls))
            found.elsewhere = self._elsewhere(calls[index], whole, labels, rows, tolerance)
            jumps = (here.diff() != 1).nonzero()
            before = int(jumps[0]) + 1 if len(jumps) else 0
            if before > 1:
                own, part = (t.narrow(labels[1], 0, before) for t in (calls[index], parts[index]))
                found.differs_from_jump = agreement(own, part, whole).difference <= tolerance
        return found, selects

    def select(self, index: int, call: Tensor, num_calls: int, labels: Labels) -> Select:
        """What takes this rank's part from a whole tensor of a module's `index`-th call.

        A tensor of another shape than `call` is part of nothing.
        """
        rows = self._rows(index, num_calls)

        def part(whole: Tensor) -> Tensor:
            found = self._part(call, whole, labels, rows, own_positions(self.job))
            return torch.zeros(0) if found is None else found

        return part

    def part_of_call(
        self, index: int, call: Tensor, whole: Tensor, labels: tuple[int, int]
    ) -> Tensor | None:
        """The part of `whole` that the output of a module's `index`-th call should equal.

        None if the output cannot be a part of it.
        """
        first, size = self._rows(0, 1).start, call.size(labels[0])
        rows = range(first + index * size, first + (index + 1) * size)
        return self._part(call, whole, labels, rows, own_positions(self.job))

    def _rows(self, index: int, num_calls: int) -> range:
        """The sequences of a call, numbered as in the reference's batch."""
        number = sum(batch.num_sequences for batch in self.batches)
        first, per_call = self.job.dims.data_rank(self.job.world.rank) * number, number // num_calls
        first += index * max(1, per_call)
        return range(first, first + max(1, per_call))

    def _part(
        self, call: Tensor, whole: Tensor, labels: Labels, rows: range, here: Tensor
    ) -> Tensor | None:
        batch_dim, token_dim = labels
        if call.ndim != whole.ndim:
            return None
        part = whole
        if batch_dim is not None and batch_dim == token_dim:
            # Flattened: the tokens of one sequence after those of another.
            places = torch.arange(rows.start, rows.stop)[:, None] * self.job.resolved.seq_len + here
            if int(places.max()) >= whole.size(batch_dim):
                return None
            part, token_dim = part.index_select(batch_dim, places.flatten()), None
        elif batch_dim is not None:
            if rows.stop > whole.size(batch_dim):
                return None
            part = part.narrow(batch_dim, rows.start, len(rows))
        if token_dim is not None:
            if int(here.max()) >= part.size(token_dim):
                return None
            part = part.index_select(token_dim, here)
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
        self, call: Tensor, whole: Tensor, labels: Labels, rows: range, tolerance: float
    ) -> str:
        """The tokens or positions for which the output would be correct; "" if there are none."""
        job, n = self.job, len(own_positions(self.job))
        candidates = {
            f"the tokens of cp rank {rank}": job.layout.positions(rank, job.resolved.seq_len)
            for rank in range(job.dims.cp)
        }
        candidates[f"positions 0 to {n - 1}"] = torch.arange(n)
        for words, here in candidates.items():
            part = self._part(call, whole, labels, rows, here)
            if part is not None and agreement(call, part, whole).difference <= tolerance:
                return words
        return ""
