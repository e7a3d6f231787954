"""On a rank: compares what modules receive and return with the reference's.

The part of the reference's tensor that a rank should have follows from sizes: a dimension as long
as the batch has the rank's rows, one as long as the sequence its columns, and one that is still n
times too long is cut into n chunks along an axis of n ranks. The tokens may also be flattened, or
cut into sequence shards first. If no such part fits, equal rows or columns are looked for. What
differs is summed over each axis.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from titanlite.mesh.parallel_dims import Grid
from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.program.batches import Where
from titanlite.tools.verify.program.events import Events
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.record import (
    Agreement,
    ModelRun,
    ModuleOutput,
    RankTrace,
    is_input,
    module_of,
)
from titanlite.tools.verify.subject import HeldParts, Subject
from titanlite.tools.verify.tracing import gathered, sum_gradients, sum_outputs, sum_over_axes

# No more ways to cut an output than this are tried, and no larger gradients are saved.
MOST_WAYS = 64
MOST_ELEMENTS = 1 << 24


Select = Callable[[Tensor], Tensor]
"""Takes a rank's part from a whole tensor."""


@dataclass
class Tracer:
    """Compares one rank's step with the record of the reference's."""

    subject: Subject
    grid: Grid
    rank: int
    where: Where | None
    record: ModelRun
    request: Request
    tolerance: float
    _chosen: dict[str, list[Select]] = field(default_factory=dict)
    """For each tensor, which part of the reference's that of each call should equal."""

    def trace(self, kept: Events, known: Mapping[str, Any], wrong: list[str]) -> RankTrace:
        """Compare outputs; every rank of the world must call this. `wrong` are wrong gradients."""
        found: dict[str, ModuleOutput] = {}
        left = []
        for event, calls in list(kept.first.items()):
            whole = known["outputs"].get(event)
            if whole is None or self.request.leaves_out(module_of(event)):
                continue
            calls = calls[-(self.request.microbatches or len(calls)) :]
            compared = self._compare(event, calls, whole)
            if len(calls) > 2 and (compared is None or compared.is_moved):
                # A pipeline's first step starts with a call that only finds shapes.
                compared = self._compare(event, calls[1:], whole) or compared
            if compared is None:
                left.append(event)
                continue
            found[event] = compared
            if not is_input(event):
                compared.recomputed = kept.recomputed_difference(module_of(event))
        for event in self._harmless({event: not o.wrong_calls for event, o in found.items()}):
            found[event].wrong_calls = ()
        factors, backward = self._compare_backward(kept, known, found)
        trace = RankTrace(
            rank=self.rank,
            coordinates=self.grid.coordinates(self.rank),
            modules={event: one for event, one in found.items() if not is_input(event)},
            **self._sum_outputs(found, kept, known),
            summed_gradients=sum_gradients(
                self.subject,
                sorted({name for of_rank in gathered(wrong) for name in of_rank}),
                known["gradients"],
            ),
            pending_inputs=tuple(kept.pending_inputs),
            inputs={event: one for event, one in found.items() if is_input(event)},
            not_compared=tuple(left),
        )
        self._sum_backward(trace, backward, kept, known, factors)
        return trace

    def _harmless(self, is_right: Mapping[str, bool], *, is_backward: bool = False) -> list[str]:
        """Tensors that differ, though all that is computed from them next agrees on every rank.

        A layer of a hand-made pair may return a Partial that the code after it reduces, and experts
        receive their tokens in an order of their own. In the backward pass the tensors that come
        next are those with a gradient that a tensor is computed from.
        """
        state: dict[str, bool] = {}
        for of_rank in gathered(dict(is_right)):
            for event, agrees in of_rank.items():
                state[event] = state.get(event, True) and agrees
        following: dict[str, list[str]] = defaultdict(list)
        for event, sources in self.record.flow.items():
            for source in sources:
                if not is_backward:
                    following[source].append(event)
                elif source in self.record.with_gradient:
                    following[event].append(source)
        found: dict[str, bool] = {}
        order = self.record.modules
        for event in order if is_backward else reversed(order):
            after = following[event]
            found[event] = state.get(event, False) or (
                bool(after) and all(found.get(other, False) for other in after)
            )
        return [event for event, agrees in is_right.items() if not agrees and found.get(event)]

    def _compare(self, event: str, calls: list[Tensor], known: list[Tensor]) -> ModuleOutput | None:
        """A tensor compared with the best fitting part of the reference's; None if none fits."""
        if len(known) not in (1, len(calls)) or not calls[0].ndim:
            return None
        chosen: list[Select] = []
        found: list[Agreement] = []
        is_moved, elsewhere = False, ""
        for index, call in enumerate(calls):
            whole = known[index] if len(known) == len(calls) else known[0]
            share = (index, len(calls)) if len(known) == 1 else (0, 1)
            best: tuple[Agreement, Select] | None = None
            for select in self.ways(call, whole, share):
                one = agreement(call, select(whole), whole)
                if best is None or one.error < best[0].error:
                    best = one, select
                if one.difference <= self.tolerance:
                    break
            if best is None or not best[0].difference <= self.tolerance:
                # Rows of zeros are taken for padding only where no part of the reference's fits.
                moved = self._match(call, whole, share, may_pad=best is None)
                if moved is not None:
                    if best is not None and self._tokens(whole, share) is not None:
                        elsewhere = "the rows or columns of one process, in another order"
                    is_moved = True
                    best = agreement(call, moved(whole), whole), moved
            if best is None:
                return None
            found.append(best[0])
            chosen.append(best[1])
        self._chosen[event] = chosen
        wrong = tuple(
            i for i, one in enumerate(found) if is_moved or not one.difference <= self.tolerance
        )
        worst = max(found, key=lambda one: one.error)
        aa, ab, bb = (sum(getattr(one, name) for one in found) for name in ("aa", "ab", "bb"))
        total = Agreement(worst.error, worst.scale, aa, ab, bb, found[0].digest)
        return ModuleOutput(total, len(calls), wrong, is_moved=is_moved, elsewhere=elsewhere)

    def ways(self, call: Tensor, whole: Tensor, share: tuple[int, int]) -> Iterator[Select]:
        """The parts of `whole` that have the shape of `call`, a microbatch (index, count)."""
        if call.ndim == whole.ndim:
            per_dim = [list(self._ways_of_dim(call, whole, dim, share)) for dim in range(call.ndim)]
            for cuts in itertools.islice(itertools.product(*per_dim), MOST_WAYS):
                yield functools.partial(_cut, cuts)
        grid = self._tokens(whole, share)
        if grid is None or call.ndim < 2:
            return
        own, width = call[..., 0].numel(), call.size(-1)
        if own == 0 or grid.numel() % own or width == 0 or whole.size(-1) % width:
            return
        count, features = grid.numel() // own, whole.size(-1) // width
        for index in self._indices(count):
            # Sequence shards, rows or flattened tokens, in order, or the sequence dimension first.
            columns = grid.chunk(count, 1)[index] if grid.size(1) % count == 0 else grid[:, :0]
            for tokens in (columns, columns.T, grid.flatten().chunk(count)[index]):
                is_turned = tokens is not columns and tokens.ndim == 2
                if tokens.numel() != own or (is_turned and call.shape[:-1] != tokens.shape):
                    continue
                for feature in self._indices(features):
                    yield functools.partial(
                        _take, tokens.flatten(), (feature, features), call.shape
                    )

    def _tokens(self, whole: Tensor, share: tuple[int, int]) -> Tensor | None:
        """The numbers [rows, columns] of this rank's tokens among all rows of `whole`."""
        if self.where is None or whole.ndim < 2 or self.where.num_columns == 1:
            return None
        if whole[..., 0].numel() != self.where.num_rows * self.where.num_columns:
            return None
        return self._rows(share)[:, None] * self.where.num_columns + self.where.columns[None]

    def _match(
        self, call: Tensor, whole: Tensor, share: tuple[int, int], *, may_pad: bool
    ) -> Select | None:
        """Rows, or columns of this rank's tokens, of the reference, in the order of `call`."""
        if call.ndim < 2 or whole.ndim < 2 or not call.is_floating_point() or not call.numel():
            return None
        if not may_pad and not call.flatten(0, -2).any(1).all():
            return None
        own, known = call.flatten(0, -2), whole.flatten(0, -2)
        most = self.tolerance * max(known.abs().max().item(), 1e-300)
        if own.size(1) == known.size(1) > 1 and own.size(0) > 1:
            rows = _find_rows(own, known, most)
            if rows is not None:
                return lambda tensor: _rows_or_zero(tensor.flatten(0, -2), rows).view(call.shape)
        grid = self._tokens(whole, share)
        tokens = torch.arange(known.size(0)) if grid is None else grid.flatten()
        if own.size(0) == len(tokens) > 1 and own.size(1) <= known.size(1):
            columns = _find_rows(own.T, known[tokens].T, most)
            if columns is not None:
                return lambda tensor: _rows_or_zero(
                    tensor.flatten(0, -2)[tokens].T, columns
                ).T.reshape(call.shape)
        return None

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
            times = size // self.where.num_rows
            if times > 1 and size % self.where.num_rows == 0:
                # Several rows for each of the batch: batches below each other, or row by row.
                copies = torch.arange(times)
                bases.append((copies[:, None] * self.where.num_rows + rows[None]).flatten())
                bases.append((rows[:, None] * times + copies[None]).flatten())
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
        if count == 1:
            yield 0
        place = self.grid.coordinates(self.rank)
        for number in (1, 2):
            for axes in itertools.combinations(self.grid.axes_in_use, number):
                if math.prod(self.grid.degrees[axis] for axis in axes) == count:
                    index = 0
                    for axis in axes:
                        index = index * self.grid.degrees[axis] + place[axis]
                    yield index

    def _compare_backward(
        self, kept: Events, record: Mapping[str, Any], found: dict[str, ModuleOutput]
    ) -> tuple[list[float], dict[str, bool]]:
        """Compare the gradients; returns each call's common factor, and which are wrong.

        A loss that is a mean over the rank's own part scales all of them by one factor: that of the
        last tensor in forward order.
        """
        factors: list[float] = []
        wrong: dict[str, bool] = {}
        for event in reversed(self.record.modules):
            pairs = self._gradients(event, kept, record) if event in found else []
            if not pairs or found[event].is_moved:
                continue
            if len(factors) != len(pairs):
                fits = [agreement(own, part, part) for own, part in pairs]
                new = [fit.ab / fit.bb if fit.bb else 0.0 for fit in fits]
                if factors or not all(new) or not all(map(math.isfinite, new)):
                    continue
                factors = new
            scaled = [
                agreement(own / factor, part, part)
                for (own, part), factor in zip(pairs, factors, strict=True)
            ]
            worst = max(scaled, key=lambda one: one.difference)
            is_wrong = not worst.difference <= self.tolerance
            found[event].gradient = worst if is_wrong else worst._replace(error=0.0)
            wrong[event] = is_wrong
        for event, one in found.items():
            if event in self.record.with_gradient and module_of(event) not in kept.again:
                one.is_cut_off = not kept.requires_grad[event]
                one.has_no_gradient = event not in kept.arrived
                if one.has_no_gradient:
                    wrong[event] = True
        agrees = {event: not is_wrong for event, is_wrong in wrong.items()}
        for event in self._harmless(agrees, is_backward=True):
            found[event] = replace(
                found[event], gradient=None, is_cut_off=False, has_no_gradient=False
            )
            del wrong[event]
        return factors, wrong

    def _gradients(
        self, event: str, kept: Events, record: Mapping[str, Any]
    ) -> list[tuple[Tensor, Tensor]]:
        """The gradients of a tensor in each call, with the reference's; none if one is missing."""
        own, known = kept.gradients_of(event), record["output_gradients"].get(event)
        if own is None or not known:
            return []
        chosen = self._chosen[event]
        own = own[-len(chosen) :]
        if len(known) == 1:
            known = known * len(own)
        if len(known) != len(own) or len(own) != len(chosen):
            return []
        return [
            (one, part)
            for one, whole, select in zip(own, known, chosen, strict=True)
            if (part := select(whole)).shape == one.shape
        ]

    def _sum_outputs(
        self, found: Mapping[str, ModuleOutput], kept: Events, known: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The first wrong tensor of the world, in its first call, summed over each axis."""
        mine = {e: bool(o.is_moved and not o.elsewhere) for e, o in found.items() if o.wrong_calls}
        everyone = gathered(mine)
        # The diagnosis takes rows in another order only if nothing else differs.
        order = [
            event
            for can_be_moved in (False, True)
            for event in self.record.modules
            if any(of_rank.get(event) is can_be_moved for of_rank in everyone)
        ]
        own = [event for event in order[:1] if event in found]
        return sum_outputs(
            self.subject,
            order[:1],
            {event: found[event] for event in own},
            {event: kept.first[event][-len(self._chosen[event]) :] for event in own},
            {event: self._chosen[event][0](known["outputs"][event][0]) for event in own},
            # The reference's are those after its step.
            {name: local_part(one.parameter.detach()) for name, one in self.subject.held.items()},
        )

    def _sum_backward(
        self,
        trace: RankTrace,
        backward: Mapping[str, bool],
        kept: Events,
        record: Mapping[str, Any],
        factors: Sequence[float],
    ) -> None:
        """Sum each wrong gradient over each axis."""
        mine = {
            event: (bad, tuple(part.shape))
            for event, bad in backward.items()
            for _, part in self._gradients(event, kept, record)[:1]
        }
        everyone = gathered(mine)
        wrong = {event for of_rank in everyone for event, (bad, *_) in of_rank.items() if bad}
        for event in [event for event in reversed(self.record.modules) if event in wrong]:

            def gradient(event: str = event) -> Tensor:
                return self._gradients(event, kept, record)[0][0] / factors[0]

            def compare(total: Tensor, event: str = event) -> Agreement:
                part = self._gradients(event, kept, record)[0][1]
                return agreement(total, part, part)

            shapes = [of_rank[event][1] if event in of_rank else None for of_rank in everyone]
            sums = sum_over_axes(self.subject, shapes, gradient)
            trace.summed_backward[event] = {axis: compare(one) for axis, one in sums.items()}


def _cut(cuts: Sequence[tuple[Tensor | None, int, int]], whole: Tensor) -> Tensor:
    for dim, (numbers, index, count) in enumerate(cuts):
        if numbers is not None:
            whole = whole.index_select(dim, numbers)
        whole = whole.chunk(count, dim)[index] if count > 1 else whole
    return whole


def _take(tokens: Tensor, feature: tuple[int, int], shape: torch.Size, whole: Tensor) -> Tensor:
    """Some tokens, and a chunk (index, count) of their features, in a shape."""
    index, count = feature
    return whole.flatten(0, -2)[tokens].chunk(count, -1)[index].reshape(shape)


def _find_rows(own: Tensor, known: Tensor, most: float) -> Tensor | None:
    """For each row of `own` a row of `known` within `most`, -1 for a row of zeros; or None."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.rand(own.size(1), generator=generator, dtype=torch.float64)
    order = (known.double() @ direction).sort()
    place = torch.searchsorted(order.values, own.double() @ direction)
    # The nearest row may lie on either side, and rounding may exchange neighbours.
    beside = torch.stack([(place + step).clamp(0, len(order.values) - 1) for step in (-1, 0, 1)])
    rows = order.indices[beside]
    apart = (known[rows] - own).abs().amax(-1)
    best = apart.min(0)
    chosen = rows.gather(0, best.indices[None])[0]
    is_zero = ~own.any(1)
    chosen[is_zero] = -1
    if is_zero.all() or not (best.values <= most)[~is_zero].all():
        return None
    return chosen


def _rows_or_zero(whole: Tensor, rows: Tensor) -> Tensor:
    return whole[rows.clamp(min=0)] * (rows >= 0).to(whole.dtype)[:, None]


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
    own = tree_map(lambda leaf: local_part(leaf) if isinstance(leaf, Tensor) else leaf, batch)
    found = {"rank": rank, "batch": own, "digest": digest, "gradients": gradients}
    torch.save(found, path)
    return str(path)
