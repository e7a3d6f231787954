"""On a rank: compares module outputs with the reference's, and sums what is wrong over each axis.

The part of the reference's output that a rank should have follows from sizes: a dimension as long
as the batch has the rank's rows, one as long as the sequence its columns, and one that is still n
times too long is cut into n chunks along an axis of n ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.mesh.parallel_dims import Grid
from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import agreement, digest_of
from titanlite.tools.verify.outputs import Outputs
from titanlite.tools.verify.program.batches import Where
from titanlite.tools.verify.record import Agreement, ModuleOutput, RankTrace
from titanlite.tools.verify.subject import HeldParts, Subject
from titanlite.tools.verify.tracing import (
    compare_calls,
    compare_outputs,
    gathered,
    sum_gradients,
    sum_outputs,
    sum_over_axes,
)

# No more ways to cut an output than this are tried, and no larger gradients are saved.
MOST_WAYS = 64
MOST_ELEMENTS = 1 << 24


@dataclass
class Tracer:
    """Compares one rank's step with the record of the reference's."""

    subject: Subject
    grid: Grid
    rank: int
    where: Where | None
    modules: Sequence[str]
    """The reference's calls in forward order."""
    tolerance: float

    def trace(self, kept: Outputs, record: Mapping[str, Any], wrong: list[str]) -> RankTrace:
        """Compare outputs; every rank of the world must call this. `wrong` are wrong gradients."""

        def compare(
            _: str, calls: list[Tensor], known: list[Tensor]
        ) -> tuple[ModuleOutput, list[Tensor]] | None:
            compared = self._compare(calls, known)
            if compared is None and len(calls) > 2:
                # A pipeline's first step starts with a call that only finds shapes.
                compared = self._compare(calls[1:], known)
            return compared

        found, parts = compare_outputs(kept, record["outputs"], compare)
        factor, backward = self._compare_backward(kept, record, found)
        names = sorted({name for of_rank in gathered(wrong) for name in of_rank})
        trace = RankTrace(
            rank=self.rank,
            coordinates=self.grid.coordinates(self.rank),
            modules=found,
            summed_gradients=sum_gradients(self.subject, names, record["gradients"]),
            pending_inputs=tuple(kept.pending_inputs),
            idle=kept.idle,
            **sum_outputs(self.subject, self.modules, found, kept.first, parts, record["weights"]),
        )
        self._sum_backward(trace, backward, kept, record, parts, factor)
        return trace

    def _compare(
        self, calls: list[Tensor], known: list[Tensor]
    ) -> tuple[ModuleOutput, list[Tensor]] | None:
        """An output compared with the best fitting part of the reference's; None if none fits."""
        if len(known) not in (1, len(calls)) or not calls[0].ndim:
            return None

        def ways(index: int, call: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            whole = known[index] if len(known) == len(calls) else known[0]
            share = (index, len(calls)) if len(known) == 1 else (0, 1)
            yield from ((part, whole) for part in self.ways(call, whole, share))

        return compare_calls(calls, ways, self.tolerance)

    def ways(self, call: Tensor, whole: Tensor, share: tuple[int, int]) -> Iterator[Tensor]:
        """The parts of `whole` that have the shape of `call`, a microbatch (index, count)."""
        if call.ndim != whole.ndim:
            return
        per_dim = [list(self._ways_of_dim(call, whole, dim, share)) for dim in range(call.ndim)]
        for chosen in itertools.islice(itertools.product(*per_dim), MOST_WAYS):
            part = whole
            for dim, (numbers, index, count) in enumerate(chosen):
                if numbers is not None:
                    part = part.index_select(dim, numbers)
                part = part.chunk(count, dim)[index] if count > 1 else part
            yield part

    def _ways_of_dim(
        self, call: Tensor, whole: Tensor, dim: int, share: tuple[int, int]
    ) -> Iterator[tuple[Tensor | None, int, int]]:
        """Selections of one dimension: the numbers to take first, then a chunk (index, count)."""
        own, size = call.size(dim), whole.size(dim)
        bases: list[Tensor | None] = [None] if own == size else []
        if self.where is not None:
            rows = self._rows(share)
            columns, num_columns = self.where.columns, self.where.num_columns
            if size == self.where.num_rows:
                bases.append(rows)
            if size == num_columns and num_columns > 1:
                bases.append(columns)
            if size == self.where.num_rows * num_columns and num_columns > 1:
                bases.append((rows[:, None] * num_columns + columns[None]).flatten())
        bases += [None] if own != size else []
        for base in bases:
            left = size if base is None else len(base)
            if left == own:
                yield base, 0, 1
            elif own and left % own == 0:
                for index in self._indices(left // own):
                    yield base, index, left // own

    def _rows(self, share: tuple[int, int]) -> Tensor:
        assert self.where is not None
        index, count = share
        rows = self.where.rows
        return rows.chunk(count)[index] if len(rows) % count == 0 else rows

    def _indices(self, count: int) -> Iterator[int]:
        """This rank's index among `count` along one axis, or along two taken together."""
        place = self.grid.coordinates(self.rank)
        for number in (1, 2):
            for axes in itertools.combinations(self.grid.axes_in_use, number):
                if math.prod(self.grid.degrees[axis] for axis in axes) == count:
                    index = 0
                    for axis in axes:
                        index = index * self.grid.degrees[axis] + place[axis]
                    yield index

    def _compare_backward(
        self, kept: Outputs, record: Mapping[str, Any], found: dict[str, ModuleOutput]
    ) -> tuple[float, dict[str, tuple[bool, str]]]:
        """Compare the gradients of outputs; returns their common factor, and which are wrong.

        With each comes a digest of it.

        A loss that is a mean over the rank's own part scales all of them by one factor: that of the
        last output in forward order.
        """
        factor = 0.0
        wrong: dict[str, tuple[bool, str]] = {}
        for call in reversed(self.modules):
            gradients, known = kept.gradients_of(call), record["output_gradients"].get(call)
            if call not in found or gradients is None or not known or not gradients[0].ndim:
                continue
            if len(known) != 1 or len(gradients) != 1:
                continue
            own, parts = gradients[0], list(self.ways(gradients[0], known[0], (0, 1)))
            ways = [way for part in parts if (way := agreement(own, part, part)).bb > 0]
            if not ways:
                continue
            if not factor:
                best = min(ways, key=lambda way: way.aa - way.ab**2 / way.bb)
                factor = best.ab / best.bb
                if not factor or not math.isfinite(factor):
                    return 0.0, {}
            scaled = [agreement(own / factor, part, part) for part in parts]
            best = min(scaled, key=lambda way: way.error)
            is_wrong = not best.difference <= self.tolerance
            found[call].gradient = best if is_wrong else best._replace(error=0.0)
            wrong[call] = is_wrong, best.digest
        return factor, wrong

    def _sum_backward(
        self,
        trace: RankTrace,
        backward: Mapping[str, tuple[bool, str]],
        kept: Outputs,
        record: Mapping[str, Any],
        parts: Mapping[str, Tensor],
        factor: float,
    ) -> None:
        """Sum the first wrong gradient of an output, in backward order, over each axis."""
        mine = {
            call: (bad, digest, tuple(parts[call].shape), digest_of(parts[call]) if bad else "")
            for call, (bad, digest) in backward.items()
        }
        everyone = gathered(mine)
        wrong = {call for of_rank in everyone for call, (bad, *_) in of_rank.items() if bad}
        last = next((call for call in reversed(self.modules) if call in wrong), None)
        if last is None:
            return
        for axis, group in self.subject.groups.items():
            ranks = dist.get_process_group_ranks(group)
            of_ranks = [everyone[rank][last] for rank in ranks if last in everyone[rank]]
            own, same = ({of_rank[index] for of_rank in of_ranks} for index in (1, 3))
            if len(own) == len(ranks) and len(same) == 1:
                trace.torn_backward += (axis,)

        def gradient() -> Tensor:
            gradients = kept.gradients_of(last)
            assert gradients is not None
            return gradients[0] / factor

        def compare(total: Tensor) -> Agreement:
            known = record["output_gradients"][last][0]
            ways = [agreement(total, part, part) for part in self.ways(total, known, (0, 1))]
            return min(ways, key=lambda way: way.error)

        shapes = [of_rank[last][2] if last in of_rank else None for of_rank in everyone]
        sums = sum_over_axes(self.subject, shapes, gradient)
        trace.summed_backward = {axis: (last, compare(total)) for axis, total in sums.items()}


def save_part(
    path: Path, rank: int, batch: Any, digest: str, held: HeldParts, wrong: Sequence[str]
) -> str:
    """Save a rank's part of the batch and its wrong gradients for `find_shares`."""
    gradients, num_elements = {}, 0
    for name in sorted(wrong, key=lambda name: held[name].shape.numel()):
        gradient = held[name].parameter.grad
        num_elements += held[name].shape.numel()
        if gradient is None or num_elements > MOST_ELEMENTS:
            continue
        elements = held[name].part_of(
            torch.arange(held[name].shape.numel()).view(held[name].shape),
            gradient if isinstance(gradient, DTensor) else None,
        )
        own = local_part(gradient.detach()).cpu().flatten()
        if own.numel() == elements.numel():
            gradients[name] = own.clone(), elements.flatten().clone()
    found = {"rank": rank, "batch": batch, "digest": digest, "gradients": gradients}
    torch.save(found, path)
    return str(path)
