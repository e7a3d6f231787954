"""On a rank: finds the part of the reference's module output that this rank's output should equal.

The reference is run on fewer sequences and on fewer tokens; the dimension that shrinks is the batch
or the token dimension. A rank's part is its sequences and its tokens, and its chunk over the tensor
axis in every dimension that is still smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.job import Job
from titanlite.modules.batch import Batch, call_model, join
from titanlite.modules.names import canonical_name
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.outputs import tensor_of
from titanlite.tools.verify.record import Agreement, ModuleOutput

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest difference of an output that agrees: far above rounding error, far below a bug."""


def label_dimensions(model: nn.Module, batch: Batch) -> dict[str, tuple[int | None, ...]]:
    """Module -> (batch dimension, token dimension) of its output, found by trial runs."""
    # At least two sequences, since a batch norm has no variance of one value.
    three = join([batch.rows(0, 1)] * 3)
    dim = batch.dims[batch.input_name].sequence
    # Without a dimension of tokens no output changes its shape.
    half = three if dim is None else three.tokens_to(batch.input.size(dim) // 2)
    whole, fewer, short = (_shapes_of(model, b) for b in (three, three.rows(0, 2), half))

    def changed(name: str, other: Mapping[str, torch.Size]) -> int | None:
        shape, others = whole[name], other.get(name, whole[name])
        if len(shape) != len(others):
            return None
        return next((dim for dim in range(len(shape)) if shape[dim] != others[dim]), None)

    return {name: (changed(name, fewer), changed(name, short)) for name in whole}


@torch.no_grad()
def _shapes_of(model: nn.Module, batch: Batch) -> dict[str, torch.Size]:
    shapes: dict[str, torch.Size] = {}

    def note(name: str, output: Any) -> None:
        if (tensor := tensor_of(output)) is not None:
            shapes[name] = tensor.shape

    hooks = [
        module.register_forward_hook(lambda _, inputs, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    try:
        # A model that accepts only whole sequences gets no token dimension.
        with contextlib.suppress(Exception):
            call_model(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {canonical_name(name): shape for name, shape in shapes.items()}


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
        held = self.job.held_positions
        wrong, sums, parts = [], [0.0, 0.0, 0.0], []
        worst = agreement(whole, whole, whole)
        shape = ""
        for index, call in enumerate(calls):
            rows = range(first + index * per_call, first + (index + 1) * per_call)
            part = self._part(call, whole, labels, rows, held)
            if part is None:
                shape = f"{list(call.shape)}, not a shard of {list(whole.shape)}"
                part = torch.zeros(0)
            parts.append(part)
            found = agreement(call, part, whole)
            sums = [s + v for s, v in zip(sums, (found.aa, found.ab, found.bb), strict=True)]
            if found.difference > tolerance:
                wrong.append(index)
            worst = max(worst, found, key=lambda a: a.error)
        elsewhere = ""
        if wrong and not shape and self.job.dims.cp_enabled and labels[1] is not None:
            index = wrong[0]
            rows = range(first + index * per_call, first + (index + 1) * per_call)
            elsewhere = self._elsewhere(calls[index], whole, labels, rows, tolerance)
        combined = Agreement(worst.error, worst.scale, sums[0], sums[1], sums[2], "")
        return ModuleOutput(combined, len(calls), tuple(wrong), shape, elsewhere), parts

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
        self,
        call: Tensor,
        whole: Tensor,
        labels: tuple[int | None, ...],
        rows: range,
        held: Tensor,
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
