"""On a rank: compares a step in detail with the reference's, for jobs and for other code.

Tracer     compares what modules receive and return, and the gradients of both. Of a job it is known
           which part of a tensor a rank holds (job_trace.py); for other code, a fitting part is
           looked for (program/code_trace.py)
sum_...    is what is wrong right once it is summed over a mesh axis? A Partial that is never
           reduced is, over the axis of its ranks. Along that axis all ranks must hold the same part
           of the tensor.
fit        is a gradient a sum of those of parts of the batch, with wrong coefficients?
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.mesh.parallel_dims import Grid
from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import (
    agreement,
    dense,
    digest_of,
    scales_along,
    without_padding,
    wrong_places,
)
from titanlite.tools.verify.events import Events
from titanlite.tools.verify.record import (
    Agreement,
    Fit,
    ModuleOutput,
    RankTrace,
    ReferenceTrace,
    first_call,
    harmless,
    is_input,
    module_of,
)
from titanlite.tools.verify.subject import Subject

T = TypeVar("T")

Select = Callable[[Tensor], Tensor]
"""Takes a rank's part from a whole tensor."""
Compared = tuple[ModuleOutput, list[Select]]
"""A tensor compared, and which part of the reference's that of each call should equal."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest difference of an output that agrees: far above rounding error, far below a bug."""
# The largest relative residual of an output that is explained.
EXACT = 1e-6


@dataclass
class Tracer(abc.ABC):
    """Compares one rank's step with the record of the reference's.

    All ranks of the world must call `trace`.
    """

    subject: Subject
    rank: int
    grid: Grid
    reference: ReferenceTrace
    chosen: dict[str, list[Select]] = field(default_factory=dict, kw_only=True)
    """For each tensor, which part of the reference's that of each call should equal."""

    order: tuple[int, ...] = field(default=(), kw_only=True)
    """Which of the reference's calls this rank's are, where it makes them in another order."""

    scales_gradients = False
    """Whether all gradients may have one common factor."""

    @abc.abstractmethod
    def compare(self, event: str, calls: list[Tensor], known: list[Tensor]) -> Compared | None:
        """A tensor compared with its parts of the reference's; None if it cannot be one."""

    @abc.abstractmethod
    def leaves_out(self, event: str) -> bool:
        """Whether a tensor is not to be compared."""

    @abc.abstractmethod
    def tolerance_of(self, tensor: Tensor) -> float:
        """The largest difference of a tensor that agrees."""

    def has_rows_of(self, own: Tensor, whole: Tensor, share: tuple[int, int]) -> bool:
        """Whether a tensor has rows of the reference's, in any order; False if not looked for."""
        return False

    def in_order(self, kept: Events, known: Mapping[str, Any]) -> Mapping[str, Any]:
        """`known` in the order of this rank's calls of modules, where that is another one."""
        return known

    def look_closer(
        self, event: str, output: ModuleOutput, kept: Events, known: Mapping[str, list[Tensor]]
    ) -> None:
        """Add what else is to be seen of the first wrong tensor."""
        return

    def batch_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different rows; every rank must call this."""
        return ()

    def is_of_no_data(self, event: str, known: Mapping[str, Any]) -> bool:
        """Whether one process computes a tensor from no samples, the same on every rank."""
        return False

    @abc.abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The weights before the step."""

    def trace(self, kept: Events, known: Mapping[str, Any], names: Iterable[str]) -> RankTrace:
        """Compare the tensors of a step; `names` are the gradients that are wrong on some rank.

        `known` has the reference's: for each event "outputs" and "output_gradients", of its calls
        or of all together, and "gradients" by parameter.
        """
        found: dict[str, ModuleOutput] = {}
        left = []
        known = self.in_order(kept, known)
        for event, calls in list(kept.first.items()):
            if event not in known["outputs"] or self.leaves_out(event):
                continue
            compared = self.compare(event, calls, known["outputs"][event])
            if compared is None:
                left.append(event)
                continue
            found[event], self.chosen[event] = compared
            found[event].recomputed = kept.recomputed_difference(first_call(event))
        # Of a module that one process calls several times, but not so often, it is not known which
        # call is which.
        often = {first_call(event) for event in kept.first if event not in known["outputs"]}
        for event, one in list(found.items()):
            is_known = first_call(event) not in often and module_of(event) not in kept.repeated
            if one.wrong_calls and not is_known:
                del found[event]
                left.append(event)
        for event in self._harmless({event: not o.wrong_calls for event, o in found.items()}):
            found[event].wrong_calls, found[event].is_other = (), True
        for event, shape in kept.shapes.items():
            whole = known["outputs"].get(event)
            output = None if whole is None else _if_too_large(kept.first[event], whole, shape)
            if output is not None and not self.leaves_out(event):
                found[event] = output
                self.chosen[event] = [lambda whole: whole] * output.num_calls
        first = next((e for e in self.reference.events if e in found and found[e].wrong_calls), "")
        if first and found[first].num_calls == 1:
            self.look_closer(first, found[first], kept, known["outputs"])
        factors, backward = self._compare_backward(kept, known, found)
        trace = RankTrace(
            rank=self.rank,
            coordinates=self.grid.coordinates(self.rank),
            events=found,
            **self._sum_first(found, kept, known),
            summed_gradients=sum_gradients(self.subject, names, known["gradients"]),
            pending_inputs=tuple(kept.pending_inputs),
            not_compared=tuple(left),
            accumulated=dict(kept.accumulated),
            num_passes=kept.values.num_passes,
            unreached=self._unreached(kept),
            order=self.order,
            lines=kept.lines,
            lines_backward=kept.lines_backward,
            idle=kept.idle,
            inferred=frozenset(kept.inferred),
            evaluating=frozenset(kept.evaluating),
        )
        self._sum_backward(trace, backward, kept, known, factors)
        return trace

    def lines(self, kept: Events) -> RankTrace:
        """Only the lines of code, of a step that is not compared."""
        place, backward = self.grid.coordinates(self.rank), kept.lines_backward
        return RankTrace(self.rank, place, lines=kept.lines, lines_backward=backward)

    def _harmless(self, is_right: Mapping[str, bool], *, is_backward: bool = False) -> list[str]:
        found = harmless(self.reference, gathered(dict(is_right)), is_backward=is_backward)
        return [event for event, agrees in is_right.items() if not agrees and event in found]

    def _compare_backward(
        self, kept: Events, known: Mapping[str, Any], found: dict[str, ModuleOutput]
    ) -> tuple[list[float], dict[str, bool]]:
        """Compare the gradients; returns each call's common factor, and which are wrong.

        A loss that is a mean over the rank's own part scales all of them by one factor: that of the
        last tensor in forward order.
        """
        factors: list[float] = []
        wrong: dict[str, bool] = {}
        for event in reversed(self.reference.events):
            pairs = self.gradient_pairs(event, kept, known) if event in found else []
            if not pairs or found[event].is_moved or found[event].has_equal_rows:
                continue
            if not self.scales_gradients:
                factors = [1.0] * len(pairs)
            if len(pairs) == 1 and len({round(factor, 6) for factor in factors}) == 1:
                # A module that is called for chunks of the sequence has one factor in all calls.
                factors = factors[:1]
            if len(factors) != len(pairs):
                fits = [agreement(own, part, part) for own, part in pairs]
                new = [fit.ab / fit.bb if fit.bb else 0.0 for fit in fits]
                if factors or not all(new) or not all(map(math.isfinite, new)):
                    continue
                # A gradient that is no multiple of the right one, such as a Partial, has no factor.
                factors = [
                    factor if fit.aa - factor * fit.ab <= EXACT**2 * fit.aa else 1.0
                    for factor, fit in zip(new, fits, strict=True)
                ]
            scaled = [
                agreement(own / factor, part, part)
                for (own, part), factor in zip(pairs, factors, strict=True)
            ]
            worst = max(scaled, key=lambda one: one.difference)
            is_wrong = not worst.difference <= self.tolerance_of(pairs[0][0])
            if is_wrong and self._repeats(event, known["outputs"]):
                continue
            found[event].gradient = worst if is_wrong else worst._replace(error=0.0)
            if is_wrong and len(pairs) == 1:
                own, part = pairs[0][0] / factors[0], pairs[0][1]
                most = self.tolerance_of(own) * part.abs().max().item()
                found[event].gradient_places = wrong_places(own, part, most)
                found[event].gradient_scales = scales_along(own, part)
            if is_wrong and len(pairs) > 1:
                found[event].gradient_adds = _adds_others(pairs)
            found[event].gradient_is_moved = is_wrong and all(
                self.has_rows_of(own / factor, whole, (index, len(pairs)))
                for index, ((own, _), whole, factor) in enumerate(
                    zip(pairs, itertools.cycle(known["output_gradients"][event]), factors)
                )
            )
            wrong[event] = is_wrong
        for event, one in found.items():
            one.is_overwritten = event in kept.overwritten
            one.is_checkpointed = event in kept.checkpointed
            if event in self.reference.with_gradient and module_of(event) not in kept.again:
                one.is_cut_off = not kept.requires_grad[event]
                one.has_no_gradient = event not in kept.arrived
                if not one.is_cut_off and self._has_gradients(event):
                    # It is without use: what it is computed from has other readers.
                    one.has_no_gradient = False
                if one.has_no_gradient:
                    wrong[event] = True
        agrees = {event: not is_wrong for event, is_wrong in wrong.items()}
        for event in self._harmless(agrees, is_backward=True):
            found[event] = replace(
                found[event], gradient=None, is_cut_off=False, has_no_gradient=False
            )
            del wrong[event]
        return factors, wrong

    def _has_gradients(self, event: str) -> bool:
        """Whether all parameters in the module of an event have a gradient, and one is not zero."""
        name = module_of(event)
        local = (
            own for n, own in self.subject.local.items() if not name or n.startswith(f"{name}.")
        )
        grads = [one.parameter.grad for one in local if one.parameter.requires_grad]
        return all(one is not None for one in grads) and any(
            bool(dense(local_part(one.detach())).any()) for one in grads if one is not None
        )

    def _unreached(self, kept: Events) -> dict[str, tuple[tuple[int, ...], int]]:
        """What modules return of which a gradient comes in some calls, but not in all."""
        found = {}
        for event, calls in kept.first.items():
            missing = tuple(n for n in range(len(calls)) if n not in kept.arrived.get(event, ()))
            is_known = event in self.reference.with_gradient and not is_input(event)
            if is_known and 0 < len(missing) < len(calls):
                found[event] = missing, len(calls)
        return found

    def gradient_pairs(
        self, event: str, kept: Events, record: Mapping[str, Any]
    ) -> list[tuple[Tensor, Tensor]]:
        """The gradients of a tensor in each call, with the reference's; none if one is missing."""
        own, known = kept.gradients_of(event), record["output_gradients"].get(event)
        if own is None or not known:
            return []
        chosen = self.chosen[event]
        own = own[-len(chosen) :]
        if len(known) == 1:
            known = known * len(own)
        if len(known) != len(own) or len(own) != len(chosen):
            return []
        return [
            (real, part)
            for one, whole, select in zip(own, known, chosen, strict=True)
            if (real := without_padding(one, part := select(whole))).shape == part.shape
        ]

    def _repeats(self, event: str, known: Mapping[str, list[Tensor]]) -> bool:
        """Whether a tensor has elements of the reference's several times: the gradient of each is
        then a part of that on one process.
        """
        numbers = torch.arange(1, (whole := known[event][0]).numel() + 1).view(whole.shape)
        own = self.chosen[event][0](numbers)
        return len(own[own > 0].unique()) < int((own > 0).sum())

    def _sum_first(
        self, found: Mapping[str, ModuleOutput], kept: Events, known: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The first wrong tensor of the world, in its first call: summed over each axis, and how
        often it and these sums contain the module's bias. Fields of RankTrace.
        """
        own = {event: kept.first[event][-len(self.chosen[event])] for event in found}
        everyone = gathered(
            {
                event: (bool(o.wrong_calls), o.is_moved and not o.elsewhere, own[event].shape)
                for event, o in found.items()
            }
        )
        # The diagnosis takes rows in another order only if nothing else differs.
        order = (
            event
            for can_be_moved in (False, True)
            for event in self.reference.events
            if any(r.get(event, ())[:2] == (True, can_be_moved) for r in everyone)
        )
        first = next(order, None)
        if first is None:
            return {}
        bias, biases = self.weights().get("" if is_input(first) else f"{module_of(first)}.bias"), {}

        def compare(total: Tensor, axis: str = "") -> Agreement:
            part = self.chosen[first][0](known["outputs"][first][0])
            total = without_padding(total, part)
            has_rows = total.ndim > 1 and total[..., 0].numel() > 1 and total.is_floating_point()
            if has_rows and total.shape == part.shape:
                # The bias may be added after the sum: then the same row is missing everywhere.
                row = (part - total).flatten(0, -2).mean(0)
                if bias is not None and bias.shape == row.shape and bias.any():
                    missing = ((row @ bias.to(row)) / (bias @ bias).to(row)).item()
                    is_bias = agreement(missing * bias.to(row), row, part).difference < EXACT
                    if is_bias and abs(missing) > EXACT:
                        biases[axis] = 1.0 - missing
                total = total + row
            return agreement(total, part, part)

        if first in found and found[first].wrong_calls:
            if compare(own[first]).difference < EXACT:
                found[first].biases = biases.get("")
            biases.clear()
            found[first].extra = self._extra(first, own, known)
        shapes = [of_rank[first][2] if first in of_rank else None for of_rank in everyone]
        totals = sum_over_axes(self.subject, shapes, lambda: own[first])
        sums = {axis: compare(total, axis) for axis, total in totals.items()}
        return {"summed_output": sums, "summed_biases": biases}

    def _extra(
        self, first: str, own: Mapping[str, Tensor], known: Mapping[str, Any]
    ) -> tuple[str, float] | None:
        """What a wrong tensor has too much of, if it is a multiple of what it is computed from."""
        part = self.chosen[first][0](known["outputs"][first][0])
        if part.shape != own[first].shape or not part.is_floating_point():
            return None
        for source in self.reference.flow.get(first, ()):
            if source not in self.chosen or known["outputs"][source][0].ndim != part.ndim:
                continue
            other = self.chosen[source][0](known["outputs"][source][0])
            if other.shape == part.shape and other.any():
                fit = agreement(own[first] - part, other, part)
                factor = fit.ab / fit.bb
                if abs(factor) > EXACT and fit.aa - factor * fit.ab <= EXACT**2 * fit.aa:
                    return source, factor
        return None

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
            event: (bad, tuple(part.shape), digest_of(kept.first[event][-1]))
            for event, bad in backward.items()
            for _, part in self.gradient_pairs(event, kept, record)[:1]
        }
        everyone = gathered(mine)
        wrong = {event for of_rank in everyone for event, (bad, *_) in of_rank.items() if bad}
        batch = self.batch_axes() if wrong else ()
        without_data = gathered({e: self.is_of_no_data(e, record["outputs"]) for e in wrong})
        for event in [event for event in reversed(self.reference.events) if event in wrong]:

            def gradient(event: str = event) -> Tensor:
                return self.gradient_pairs(event, kept, record)[0][0] / factors[0]

            def compare(total: Tensor, event: str = event) -> Agreement:
                part = self.gradient_pairs(event, kept, record)[0][1]
                return agreement(total, part, part)

            shapes = [of_rank[event][1] if event in of_rank else None for of_rank in everyone]
            sums = sum_over_axes(self.subject, shapes, gradient)
            found = {axis: compare(one) for axis, one in sums.items()}
            trace.summed_backward[event] = found
            if batch and all(of_rank[event] for of_rank in without_data):
                # As that of a weight, its gradient on a rank is that of the rank's part.
                places = [of_rank[event][1:] if event in of_rank else None for of_rank in everyone]
                pairs = self.gradient_pairs(event, kept, record) if event in mine else []
                parts = (own / one for (own, _), one in zip(pairs, itertools.cycle(factors)))
                total = sum(parts, torch.zeros(()))
                for axis in batch:
                    total = sum_over_axes(self.subject, places, total.clone).get(axis, total)
                if event in mine and compare(total).difference <= self.tolerance_of(total):
                    trace.events[event].gradient = None
                    del trace.summed_backward[event]
            if not batch or set(shapes) != {tuple(record["output_gradients"][event][0].shape)}:
                continue
            # What is not cut as the batch is has gradients of the rank's part of the batch.
            total = gradient()
            for axis in batch:
                total = sum_over_axes(self.subject, shapes, total.clone)[axis]
            for axis, both in sum_over_axes(self.subject, shapes, total.clone).items():
                one = compare(both)
                if axis not in batch and one.difference < found[axis].difference:
                    found[axis] = one


def _adds_others(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[int, int] | None:
    """A microbatch whose gradient has that of another in it, and nothing else, and the other."""
    if len({part.shape for _, part in pairs}) > 1 or pairs[0][1].numel() < 2 * len(pairs):
        return None
    parts = torch.stack([part.double().flatten() for _, part in pairs], 1)
    for index, (own, _) in enumerate(pairs):
        counts = torch.linalg.lstsq(parts, own.double().flatten()[:, None]).solution
        left = (parts @ counts - own.double().flatten()[:, None]).norm() / parts.norm()
        others = [n for n, count in enumerate(counts.flatten().tolist()) if abs(count) > EXACT]
        if left < EXACT and index in others and len(others) > 1:
            return index, next(n for n in others if n != index)
    return None


def _if_too_large(calls: Sequence[Tensor], known: Any, shape: torch.Size) -> ModuleOutput | None:
    """A DTensor larger than the whole on one process: what its ranks hold are no shards of that."""
    whole = known if isinstance(known, Tensor) else known[0]
    if shape.numel() <= whole.numel():
        return None
    output = in_all([agreement(call, call, call) for call in calls], range(len(calls)))
    output.shape = f"{list(calls[0].shape)}, a part of {list(shape)}, but the whole is "
    output.shape += f"{list(whole.shape)} on one process"
    return output


def in_all(found: Sequence[Agreement], wrong: Iterable[int]) -> ModuleOutput:
    """A tensor of several calls, each compared; `wrong` are those that differ."""
    worst = max(found, key=lambda one: one.error)
    aa, ab, bb = (sum(getattr(one, name) for one in found) for name in ("aa", "ab", "bb"))
    total = Agreement(worst.error, worst.scale, aa, ab, bb, "")
    return ModuleOutput(total, len(found), tuple(wrong))


def gathered(value: T) -> list[T]:
    """The values of all ranks; every rank of the world must call this, as all functions here."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def sum_over_axes(
    subject: Subject,
    places: Sequence[object],
    tensor: Callable[[], Tensor],
    operator: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> dict[str, Tensor]:
    """Axis -> the sum of a tensor over it, if all ranks along it hold the same part.

    `places` says for each rank of the world which part it holds, None for none.
    """
    found = {}
    for axis, group in subject.groups.items():
        along = {places[rank] for rank in dist.get_process_group_ranks(group)}
        if len(along) == 1 and None not in along:
            total = tensor().to(subject.device).clone()
            dist.all_reduce(total, operator, group=group)
            found[axis] = total.cpu()
    return found


def sum_gradients(
    subject: Subject, names: Iterable[str], known: Mapping[str, Tensor]
) -> dict[str, dict[str, Agreement]]:
    """The gradients `names`, the same on every rank, each summed over each axis."""
    local, names = subject.local, [name for name in names if name in known]
    places = gathered(
        {n: local[n].place for n in names if n in local and local[n].parameter.grad is not None}
    )
    sums = {}
    for name in names:

        def own(name: str = name) -> Tensor:
            gradient = local[name].parameter.grad
            assert gradient is not None
            return local_part(gradient.detach())

        def compare(total: Tensor, name: str = name) -> Agreement:
            whole = known[name]
            one = agreement(total, local[name].part_of(whole, local[name].parameter.grad), whole)
            # What cancels out, as in the bias of keys, is as exact as its parts are.
            largest = own().abs().max().item() if total.numel() else 0.0
            return one._replace(scale=max(one.scale, largest))

        of_ranks = [of_rank.get(name) for of_rank in places]
        totals = sum_over_axes(subject, of_ranks, own)
        sums[name] = {axis: compare(total) for axis, total in totals.items()}
    return sums


def fit(parts: Sequence[Tensor], own: Tensor, known: Tensor) -> Fit | None:
    """`own` as a weighted sum of `parts`, by least squares; the residual is relative to `known`.

    None if it has too few elements for that, or if the parts are not independent.
    """
    own, stacked = own.double().flatten(), torch.stack([p.double().flatten() for p in parts], 1)
    if stacked.size(0) != len(own) or len(own) < 2 * len(parts) or not own.isfinite().all():
        return None
    solved = torch.linalg.lstsq(stacked, own[:, None], rcond=1e-9, driver="gelsd")
    if solved.rank.item() < len(parts):
        return None
    weights = solved.solution[:, 0]
    return tuple(weights.tolist()), residual(parts, weights.tolist(), own, known)


def residual(
    parts: Sequence[Tensor], weights: Sequence[float], own: Tensor, known: Tensor
) -> float:
    """What a weighted sum leaves of `own`, relative to `known`."""
    total = sum(
        weight * part.double().flatten() for weight, part in zip(weights, parts, strict=True)
    )
    scale = known.double().norm().item()
    return (total - own.double().flatten()).norm().item() / scale if scale else math.inf
