"""Combines what ranks and reference have measured into a result; torch-free."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import fmean

from titanlite.errors import ConfigError, RankError, TitanliteError
from titanlite.tools.verify import on_rank
from titanlite.tools.verify.dataflow import (
    describe_event,
    explain_backward,
    first_wrong,
    outputs_agree,
    unexplained_backward,
)
from titanlite.tools.verify.differences import (
    Key,
    Tolerance,
    differences,
    largest_of,
    unequal_replicas,
)
from titanlite.tools.verify.evidence import EXPLAINED, WRONG, pooled
from titanlite.tools.verify.gradients import missing_sums
from titanlite.tools.verify.job_runs import failure
from titanlite.tools.verify.passes import explain_loss
from titanlite.tools.verify.pool import RankPools
from titanlite.tools.verify.program.findings import PartEvidence, are_local, axes_of_batch, conclude
from titanlite.tools.verify.program.passed_back import describe_lines, describe_through
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.program.result import Comparison
from titanlite.tools.verify.record import (
    CodeRun,
    ModelRun,
    RankRun,
    RankTrace,
    around,
    is_input,
    module_of,
    operator_of,
)
from titanlite.tools.verify.sensitivity import (
    HALF_SPACING,
    NUM_PERTURBED,
    SENSITIVITY,
    Given,
    Sensitivity,
)
from titanlite.tools.verify.wording import be, is_near, listed, name_parameters

FLOAT32_ROUNDING = 2.0**-23
# A reference that differs from itself by more than this draws random numbers.
RANDOM = 1e-3
# No more values are reduced, one by one, to see whether they make right what is wrong.
MOST_COMPLETED = 8


@dataclass
class Judging:
    """Combines the ranks' measurements into a result."""

    pools: RankPools
    request: Request
    packed: bytes
    folder: str
    record: ModelRun
    runs: list[CodeRun]
    found: Comparison

    def judge(self, tolerance: float | str | None) -> None:
        """Fill in the result: from runs in which nothing is recorded, since what watches may change
        what it watches; of code that differs, another run says why.
        """
        found = self.found
        self._judge_runs(tolerance)
        if found.failures or found.splits:
            self._record(tolerance)
        self._judge_pending()
        self._judge_local()
        found.look_at_traffic(self.runs)
        self._conclude()
        self._note_not_compared()

    def _record(self, tolerance: float | str | None) -> None:
        """Run again, with a record of what modules receive and return."""
        found, plain, why = self.found, self.runs, ""
        try:
            pool, what = self.pools.of(found.grid.world_size), (self.packed, self.folder)
            self.runs = pool.call(on_rank.parallel.run_parallel, *what, self.record)
            self._judge_runs(tolerance)
            if not (found.failures or found.splits):
                why = "the difference is gone: is something done otherwise where tensors or "
                why += "modules have hooks, or a gradient is held?"
        except TitanliteError as error:
            failure(error)
            why = " ".join(str(error).split())[:200]
        if why:
            self.runs = plain
            self._judge_runs(tolerance)
            found.notes.append(f"what modules receive and return could not be recorded ({why})")

    def _judge_runs(self, tolerance: float | str | None) -> None:
        """Judge the differences of the ranks' runs."""
        found, is_narrow = self.found, bool(self.record.narrowed)
        self._place()
        found.losses = self._combine_losses()
        is_measured = tolerance == SENSITIVITY
        found.differences = self._differences(self.runs, by_distance=is_measured)
        if is_measured:
            least = HALF_SPACING[found.dtype]
            found.judge(Sensitivity(found.dtype, self._sensitivity, is_narrow, least=least))
        elif isinstance(tolerance, float):
            found.judge(Given(dtype=found.dtype, limit=tolerance))
        elif found.dtype == "float64":
            found.judge(Tolerance("float64", is_narrow=is_narrow))
        else:
            found.judge(Tolerance(found.dtype, self._rounding))
        is_wrong = any(failure.kind != "start" for failure in found.failures)
        if is_wrong and found.dtype == "float64":
            # Some tensors have larger rounding errors; measuring them also finds random numbers.
            rounding = self._rounding
            if tolerance is None:
                found.judge(Tolerance("float64", rounding, is_narrow))
        names = {name for run in self.runs for name in run.placements}
        found.splits = [split for split in unequal_replicas(self.runs) if split.name in names]

    def _conclude(self) -> None:
        """Say what is wrong, or what could be hidden."""
        found = self.found
        if not found.agrees:
            found.findings = list(found.problems)
            is_explained = found.problems and all(
                failure.kind in ("weight", "state") or failure.step > found.failures[0].step
                for failure in found.failures
            )
            if (found.failures or found.splits) and not is_explained:
                evidence = self._evidence()
                said = conclude(evidence)
                vague = (*explain_backward(evidence), *explain_loss(evidence))
                if said and said[0] in vague:
                    evidence.returned = self._returned(evidence)
                    evidence.passed_on = describe_lines(evidence)
                    said = conclude(evidence)
                found.findings += said
        elif self._reads_the_whole_batch() and all(run.averages for run in self.runs):
            unless = ", unless `step` divides it" * (self.request.step is not None)
            found.doubts.append(
                f"every rank was given the whole batch (split=None){unless}, so that an error in "
                "how ranks with different samples are averaged cannot show: give split, such as "
                'split="dp"'
            )

    def _reads_the_whole_batch(self) -> bool:
        """Whether there are several ranks, and `split` gives all the same."""
        is_same = all(len(set(parts)) == 1 for parts in self._parts_by_step())
        return is_same and len(self.runs) > 1 and self.request.reference_step is None

    def _judge_pending(self) -> None:
        """Judge gradients that are Partial by the weights: the optimizer may reduce them itself."""
        found = self.found
        names = {name for run in self.runs for name in run.pending}
        after = {
            f.name.rpartition(".")[0] if f.kind == "state" else f.name
            for f in found.failures
            if f.kind in ("start", "weight", "state")
        }
        reduced = names - after if after <= names else set()
        if reduced:
            who = name_parameters(reduced, self.runs, "gradient")
            found.notes.append(
                f"{who} {be(who)} still Partial at the optimizer step, but the weights and the "
                "optimizer state agree after it: the optimizer reduces them itself"
            )
            self._leave_to_the_step(reduced)
        first = found.failures[0].step if found.failures else 0
        wrong = {f.name for f in found.failures if f.kind == "gradient" and f.step == first}
        if names := names - reduced - wrong:
            who = name_parameters(names, self.runs, "gradient")
            found.problems.append(
                f"{who} {be(who)} still Partial at the optimizer step, though the local part is "
                "correct: an optimizer that reduces it would get a wrong gradient. Give it the "
                "placements of its parameter before the optimizer step"
            )

    def _judge_local(self) -> None:
        """Judge gradients of each rank's own part by the weights, which agree after every step."""
        found = self.found
        kinds = {failure.kind for failure in found.failures}
        names = {failure.name for failure in found.failures}
        if kinds == {"gradient"} and all(map(self._is_only_missing, names)):
            self._leave_to_the_step(names)
            found.notes.append(
                "some ranks lack gradients at the optimizer step, but the weights agree after "
                "every step on all of them: the step gives them what they lack"
            )
        elif (
            "gradient" in kinds <= {"gradient", "norm"}
            and self.request.step is not None
            and all(self._is_only_scaled(failure.step) for failure in found.failures)
        ):
            for of_step in found.differences:
                of_step.pop(("norm", ""), None)
            self._leave_to_the_step({f.name for f in found.failures if f.kind == "gradient"})
            found.notes.append(
                "the gradients are scaled when `step` returns, all by one factor, as by clipping "
                "them, but the weights agree after every step. They and their norm are not compared"
            )
        elif kinds == {"gradient"} and not found.splits and are_local(self._evidence()):
            self._leave_to_the_step({failure.name for failure in found.failures})
            found.notes.append(
                "the gradients are each rank's own at the optimizer step, but the weights agree "
                "after every step: the optimizer's step reduces them itself"
            )
        elif "gradient" in kinds:
            self._judge_few_weights()

    def _judge_few_weights(self) -> None:
        """Judge a step that reduces gradients of the ranks' own parts, all but a few rightly."""
        found, first = self.found, self.found.failures[0].step
        of_first = [f for f in found.failures if f.step == first]
        gradients, wrong = (
            {f.name for f in of_first if f.kind == kind} for kind in ("gradient", "weight")
        )
        # A first step of Adam may be right with a gradient that is not.
        if not wrong or not wrong < gradients or 2 * len(wrong) > len(gradients):
            return
        local = {n for one in missing_sums(self._evidence(), sorted(gradients)) for n in one.names}
        if gradients - local <= wrong:
            self._leave_to_the_step(gradients)
            few = sorted(wrong)
            pending = {name for run in self.runs for name in run.pending}
            if gradients - wrong <= pending and not wrong & pending:
                who = name_parameters(few, self.runs, "gradient")
                found.problems.append(
                    f"{who} {be(who)} each rank's own at the optimizer step, without a sum over "
                    "the ranks. Those of the other parameters are Partial, so DTensor reduces "
                    "them. Where a local tensor takes the place of a DTensor, say how its gradient "
                    "is placed (grad_placements of to_local, in_grad_placements of local_map): "
                    "Partial(), if each rank has other samples"
                )
                return
            copies = Counter(name for run in self.runs for name in run.placements)
            is_tied = min(copies[name] for name in few) > min(copies.values())
            found.problems.append(
                "the gradients are each rank's own at the optimizer step, which reduces them "
                f"itself. After it only {listed(few, 3)} {'are' if few[1:] else 'is'} wrong: "
                + (
                    "just those that lie on two ranks if all parameters, end to end, are cut into "
                    f"{len(self.runs)} equal parts. What the step computes of a whole parameter, "
                    "such as a norm or a trust ratio, needs both ranks' elements"
                    if wrong == _cut_evenly(self.runs[0].sizes, len(self.runs))
                    else "look at how the step reduces gradients there"
                    + ". More ranks hold it than others, so add up its copies first" * is_tied
                )
            )

    def _is_only_scaled(self, step: int) -> bool:
        """Whether all gradients of a step are one multiple of the reference's, on every rank."""
        parts = [one for run in self.runs for one in run.steps[step].gradients.values()]
        return pooled(parts)[1] < EXPLAINED

    def _is_only_missing(self, name: str) -> bool:
        """Whether a gradient is right on every rank that has one."""
        parts = [part for run in self.runs for s in run.steps if (part := s.gradients.get(name))]
        right = [part for part in parts if part.digest and part.difference <= WRONG]
        return bool(right) and all(part in right or not part.digest for part in parts)

    def _leave_to_the_step(self, names: set[str]) -> None:
        """Judge these gradients no longer, since the step itself completes them."""
        for of_step in self.found.differences:
            for name in names:
                of_step.pop(("gradient", name), None)
        self.found.judge(self.found.tolerance)

    def _note_not_compared(self) -> None:
        """Note what was left out, or has a layout or a shape that fits nothing."""
        found, request = self.found, self.request
        compared = {name for run in self.runs for step in run.steps for name in step.buffers}
        buffers = {
            f"the buffer {name}"
            for run in self.runs
            for name in run.not_compared
            if name not in compared
        }
        outputs: set[str] = set()
        if not found.agrees:
            step = found.failures[0].step if found.failures else 1
            traces = [run.traces[step] for run in self.runs if step in run.traces]
            compared = {event for trace in traces for event in trace.events}
            outputs = {
                describe_event(event)
                for trace in traces
                for event in trace.not_compared
                if event not in compared
            }
        left = [f"what leave_out names ({listed(request.leave_out, 3)})"] * bool(request.leave_out)
        states = {f"the optimizer state {name}" for run in self.runs for name in run.states_left}
        if names := [*left, *sorted(buffers), *sorted(states), *sorted(outputs)]:
            found.notes.append(f"not compared: {listed(names, 6)}")

    def _place(self) -> None:
        """Find along which axes each parameter is replicated: where ranks hold equal elements."""
        grid, runs = self.found.grid, self.runs
        names = {name for run in runs for name in run.places}
        axes = [axis for axis in grid.axes_in_use if self._is_along(axis, names)]
        for run in runs:
            for name in run.places:
                run.placements[name] = {
                    axis: "replicated"
                    if len({runs[r].places.get(name) for r in self._along(axis, run)}) == 1
                    else "sharded"
                    for axis in axes
                }

    def _is_along(self, axis: str, names: set[str]) -> bool:
        """Whether ranks along an axis hold the same parameters, or parts of one: no stages do."""
        along = [
            {self.runs[rank].places.get(name) for rank in self._along(axis, run)}
            for run in self.runs
            for name in names
        ]
        is_cut = any(len(own - {None}) > 1 for own in along)
        return is_cut or all(own == {None} or None not in own for own in along)

    def _along(self, axis: str, run: CodeRun) -> list[int]:
        """The ranks that differ from this one only on one axis."""
        place = self.found.grid.coordinates(run.rank)
        return [
            other.rank
            for other in self.runs
            if {**self.found.grid.coordinates(other.rank), axis: 0} == {**place, axis: 0}
        ]

    def _combine_losses(self) -> str:
        """Set each run's loss to what is compared with the reference's; returns how it was made.

        The losses of the distinct parts of the batch are averaged or added, whichever is closer to
        the reference's loss over all steps. A step of the reference's own returns that of all.
        """
        ways: dict[str, list[list[float]]] = {"": [], "mean": [], "sum": []}
        for step, known in enumerate(self.record.steps[1:]):
            own = [run.losses[step] for run in self.runs]
            given = [value for value in own if value is not None]
            parts = _losses_of_parts(self.runs, step)
            if not given:
                given, parts = [known.loss], [known.loss]
            ways[""].append([given[0] if value is None else value for value in own])
            ways["mean"].append([fmean(parts)] * len(own))
            ways["sum"].append([math.fsum(parts)] * len(own))
        is_split = any(len(set(of_step)) > 1 for of_step in self._parts_by_step())
        is_split = is_split and self.request.reference_step is None
        chosen = min(ways, key=lambda way: self._loss_error(ways[way])) if is_split else ""
        if chosen and self._loss_error(ways[chosen]) > EXPLAINED and self._gradients_agree():
            ways |= self._mixed_ways(ways["sum"])
            chosen = min(ways, key=lambda way: self._loss_error(ways[way]))
        # What all ranks have alike has been reduced before.
        is_alike = all(len(set(of_step)) == 1 for of_step in ways[""])
        if is_alike and self._loss_error(ways[chosen]) > EXPLAINED:
            chosen = ""
        for step, values in enumerate(ways[chosen], 1):
            for run, value in zip(self.runs, values, strict=True):
                run.steps[step].loss = value
        return chosen

    def _gradients_agree(self) -> bool:
        steps = (step for run in self.runs for step in run.steps)
        return all(one.difference < EXPLAINED for s in steps for one in s.gradients.values())

    def _mixed_ways(self, sums: list[list[float]]) -> dict[str, list[list[float]]]:
        """The losses added over some axes and averaged over others."""
        grid = self.found.grid
        axes = axes_of_batch(self.runs, grid, 1)
        averaged = chain(*(combinations(axes, number) for number in range(1, len(axes))))
        return {
            f"sum, divided by {count},": [[value / count for value in of_step] for of_step in sums]
            for count in map(grid.degree_of, averaged)
        }

    def _parts_by_step(self) -> list[list[str]]:
        return [[run.parts[step] for run in self.runs] for step in range(self.found.num_steps)]

    def _loss_error(self, values: list[list[float]]) -> float:
        return max(
            max(abs(value - known.loss) for value in of_step)
            for of_step, known in zip(values, self.record.steps[1:], strict=True)
        )

    def _differences(
        self, runs: Sequence[RankRun], *, by_distance: bool = False
    ) -> list[dict[Key, float]]:
        found = differences(runs, self.record.steps, by_distance=by_distance)
        for of_step in found:
            of_step.pop(("lr", ""), None)
            if self.request.clip is None:
                of_step.pop(("norm", ""), None)
        return found

    @functools.cached_property
    def _sensitivity(self) -> list[dict[Key, float]]:
        """The reference's largest differences from itself, perturbed."""
        numbers = range(1, NUM_PERTURBED + 1)
        again = (self._again(self.found.dtype, number) for number in numbers)
        return largest_of(again, len(self.record.steps))

    @functools.cached_property
    def _rounding(self) -> list[dict[Key, float]]:
        """The reference's differences from itself, with weights that differ in the last bit, and
        beside those in float64.

        Raises ConfigError if they are far larger than rounding error.
        """
        found, own = [self._again(self.found.dtype)], self.found.dtype
        if own != "float64":
            try:
                found.append(self._again("float64"))
            except TitanliteError as error:
                failure(error)
                # One run may agree by chance.
                found.append([dict.fromkeys(of_step, FLOAT32_ROUNDING) for of_step in found[0]])
                self.found.notes.append(
                    "the reference does not run in float64, so its rounding error is measured in "
                    f"{own} alone ({' '.join(str(error).split())[:200]})"
                )
        return largest_of(found, len(self.record.steps))

    def _again(self, dtype: str, perturbed: int = 0) -> list[dict[Key, float]]:
        what = self.packed, self.folder, self.record
        again = self.pools.alone(on_rank.parallel.run_again, *what, dtype, perturbed)
        for step, value in enumerate(again.losses, 1):
            # The loss function of one process always returns a loss.
            again.steps[step].loss = value or 0.0
        found = self._differences([again], by_distance=perturbed > 0)
        # In one step two draws may have nearly the same loss.
        loss = max(of_step.get(("loss", ""), 0.0) for of_step in found[1:3])
        if loss > RANDOM and not perturbed:
            raise ConfigError(
                f"reference: a second run has another loss, by {loss:.0e}: it draws "
                "random numbers, or keeps state outside the model that the function returns; turn "
                "off dropout (p=0, or model.eval() in the function), and build all state there"
            )
        return found

    def _evidence(self) -> PartEvidence:
        found, record = self.found, self.record
        evidence = PartEvidence(found.grid, record.steps, self.runs, found, tied=record.tied)
        step = max(1, evidence.step)
        traces = [run.traces[step] for run in self.runs if step in run.traces]
        evidence.reference_trace, evidence.traces = record.trace, traces
        evidence.changed = record.changed.get(step, ())
        evidence.accumulated = record.accumulated.get(step, {})
        evidence.trained = {name for own in record.accumulated.values() for name in own}
        evidence.is_split = len(set(self._parts_by_step()[step - 1])) > 1
        evidence.num_microbatches = self.request.microbatches or _num_calls(traces)
        first = [run.traces[1] for run in self.runs if 1 in run.traces]
        evidence.first_microbatches = _num_calls(first)
        by_part: dict[str, list[int]] = {}
        for run in self.runs:
            by_part.setdefault(run.parts[step - 1], []).append(run.rank)
        files = [trace.file for trace in traces]
        wrong, most = evidence.failed("gradient"), -1
        # A fit of each microbatch has more unknowns, and may be impossible. Calls to which nothing
        # comes back may be none.
        unreached = [own for trace in traces for own in trace.unreached.values()]
        reached = (number - len(missing) for missing, number in unreached)
        for count in dict.fromkeys((1, evidence.num_microbatches, *reached)):
            if not (all(files) and wrong) or 2 * most > len(wrong):
                continue
            parts = None
            with contextlib.suppress(RankError):
                what = self.packed, self.folder, step, files, count
                parts = self.pools.alone(on_rank.reference.find_shares, *what)
            if parts is None:
                continue
            mixed, number = parts.mixed or evidence.fits.mixed, sum(map(parts.explains, wrong))
            if number > most:
                most, evidence.fits = number, parts
                evidence.parts = [
                    (ranks, index if count > 1 else None)
                    for ranks in by_part.values()
                    for index in range(count)
                ]
            evidence.fits.mixed = mixed
        if all(files) and (left := [name for name in wrong if not evidence.fits.explains(name)]):
            with contextlib.suppress(RankError):
                asked = self.packed, self.folder, step, files, left
                evidence.uses = self.pools.alone(on_rank.uses.find_uses, *asked)
        is_before_step = any(map(evidence.failed, ("loss", "gradient", "buffer"))) and traces
        if is_before_step or evidence.failed("weight"):
            self._watch(evidence, step)
        if evidence.failed("weight"):
            saved = {run.rank: run.updates[step] for run in self.runs if step in run.updates}
            with contextlib.suppress(RankError):
                judge, own = on_rank.weights.judge_updates, list(saved.values())
                updates = self.pools.alone(judge, self.packed, step, own)
                failed = set(evidence.failed("weight"))
                evidence.updates = {
                    rank: {name: one for name, one in found.items() if name in failed}
                    for rank, found in zip(saved, updates, strict=True)
                }
        return evidence

    def _complete(self, evidence: PartEvidence, step: int) -> str:
        """The line whose result, reduced over an axis, makes what is wrong right; "" if none does.

        Each rank takes a sum, or what is scaled by one, over its own part alone. What follows from
        it, such as a quotient, is then no share of what it should be.
        """
        event, e = first_wrong(evidence), evidence
        line, module = e.wrong_line(event), module_of(event)
        if line is not None and not line.only_here and not line.is_of_part:
            return ""
        own = [t.events[event].agreement for t in e.traces if event in t.events]
        # A common factor has a sentence of its own.
        if pooled(own)[1] < EXPLAINED if event else not e.failed("loss"):
            return ""
        shapes = [trace.over_parts for trace in e.watched]
        # The loss has no call, as the model has none.
        agrees = {c for t in e.traces for c, one in t.events.items() if c and not one.wrong_calls}
        places = [
            place
            for place, shape in shapes[0].items()
            if all(of_rank.get(place) == shape for of_rank in shapes)
            and place[0][0] not in agrees
            and (is_input(event) or module in (inner := module_of(place[0][0]), *around(inner)))
        ]
        pool = self.pools.of(e.dims.world_size)
        for place in places[:MOST_COMPLETED]:
            # Stages of a pipeline do not meet in one line.
            for axis in filter(self._runs_alike, e.dims.axes_in_use):
                what = self.packed, self.folder, self.record, step, (place, axis, event)
                try:
                    runs = pool.call(on_rank.parallel.run_parallel, *what)
                except TitanliteError:
                    # With another result, such as a count, the code may not go on.
                    continue
                found = [t.events[event] for run in runs if event in (t := run.traces[step]).events]
                factor, left = pooled([one.agreement for one in found])
                if not event:
                    losses = [run.losses[-1] or 0.0 for run in runs]
                    if e.is_split and (parts := _losses_of_parts(runs, -1)):
                        ways = fmean(parts), math.fsum(parts)
                        losses = [min(ways, key=lambda way: abs(way - e.reference[step].loss))]
                    ratios = [one / e.reference[step].loss for one in losses]
                    factor, left = ratios[0], max(ratios) - min(ratios)
                degree = e.dims.degrees[axis]
                known = any(
                    is_near(factor, n) for n in (1, degree, 1 / degree)[: 3 if event else 1]
                )
                if left >= EXPLAINED or not known:
                    continue
                whole = describe_event(event) if event else "the loss"
                way = operator_of(place[0]).strip("_")
                return (
                    f"the line {place[0][1]} takes a {way} over each rank's own part alone, and "
                    f"what follows from it is wrong: with the {way} over {axis}, {whole} is "
                    + ("correct" if is_near(factor, 1.0) else f"{factor:g} times what it should be")
                    + f". Reduce it over {axis} before it is used"
                )
        return ""

    def _alone(self, e: PartEvidence, step: int) -> str:
        """For which parts of the batch, each alone, the mean of the reference's losses is the wrong
        loss; "" for none.
        """
        own, known, count = e.runs[0].steps[step].loss, e.reference[step].loss, e.num_microbatches
        cells = [cell for run in self.runs if (cell := run.cells[step - 1]) is not None]
        if not (e.failed("loss") and e.failed("gradient") and outputs_agree(e)) or not cells:
            return ""
        if e.completed or e.wrong_line() is not None:
            return ""
        parts = [*dict.fromkeys(rows for _, _, rows, _ in cells)]
        if {*chain(*parts)} != {*range(cells[0][0])} or any(len(rows) % count for rows in parts):
            return ""
        cut = [
            [rows[len(rows) // count * i : len(rows) // count * (i + 1)] for i in range(count)]
            for rows in parts
        ]
        ways = {
            "each rank's part": parts,
            f"each of the {count} microbatches": [
                tuple(chain(*own)) for own in zip(*cut, strict=True)
            ],
            "each microbatch of each rank": [one for own in cut for one in own],
        }
        asked = {words: way for words, way in ways.items() if len(way) > 1}
        what = self.packed, self.folder, step, [*asked.values()]
        losses = self.pools.alone(on_rank.reference.losses_of_rows, *what) if asked else []
        for words, of_way in zip(asked, losses, strict=True):
            if is_near(fmean(of_way), own) and not is_near(own, known):
                return words
        return ""

    def _runs_alike(self, axis: str) -> bool:
        """Whether the ranks along an axis have parameters of the same names."""
        return all(
            run.placements.keys() == self.runs[rank].placements.keys()
            for run in self.runs
            for rank in self.found.grid.group(run.rank, axis)
        )

    def _returned(self, evidence: PartEvidence) -> str:
        """Through which line what is wrong in the first wrong gradient comes back; "" if unknown.

        Where it is not known otherwise.
        """
        if not evidence.watched or (place := unexplained_backward(evidence)) is None:
            return ""
        event, until = place
        pool, step = self.pools.of(self.found.grid.world_size), max(1, evidence.step)
        what = self.packed, self.folder, self.record, step, event, until
        try:
            found = pool.call(on_rank.through.gradients_through, *what)
        except TitanliteError as error:
            failure(error)
            return ""
        count = len(set(self._parts_by_step()[step - 1]))
        plain = {"mean": [1 / count], "sum": [1.0]}.get(self.found.losses, [1.0, 1 / count])
        return describe_through(evidence, event, found, plain)

    def _watch(self, evidence: PartEvidence, step: int) -> None:
        """Run both sides again, and note the lines of the caller's code."""
        what = self.packed, self.folder
        try:
            first = first_wrong(evidence)
            call = "" if is_input(first) else module_of(first)
            self.pools.alone(on_rank.reference.run_model, *what, step, call)
            pool = self.pools.of(self.found.grid.world_size)
            loss = fmean(run.steps[step].loss for run in self.runs)
            if all(run.averages for run in self.runs):
                loss = fmean(_losses_of_parts(self.runs, step - 1) or [loss])
            runs = pool.call(on_rank.parallel.run_parallel, *what, self.record, step, loss=loss)
            evidence.watched = [run.traces[step] for run in runs]
            evidence.completed = self._complete(evidence, step)
        except TitanliteError as error:
            failure(error)
            why = " ".join(str(error).split())
            self.found.notes.append(f"the lines of the code could not be compared ({why[:200]})")
        # The loss of a part may need the whole batch.
        with contextlib.suppress(RankError):
            evidence.alone = self._alone(evidence, step)


def _cut_evenly(sizes: Mapping[str, int], num_ranks: int) -> set[str]:
    """The parameters on several ranks, if all, laid end to end, are cut into equal parts."""
    part, start = -(-sum(sizes.values()) // num_ranks), 0
    cut = set[str]()
    for name, size in sizes.items():
        cut |= {name} if start // part < (start + size - 1) // part else set()
        start += size
    return cut


def _losses_of_parts(runs: Sequence[CodeRun], step: int) -> list[float]:
    """The loss of each distinct part of a batch; ranks that compute none are left out."""
    found: dict[str, float] = {}
    for run in runs:
        if (value := run.losses[step]) is not None:
            found.setdefault(run.parts[step], value)
    return list(found.values())


def _num_calls(traces: Sequence[RankTrace]) -> int:
    """How often modules run in a step."""
    return max((one.num_calls for t in traces for one in t.modules.values()), default=1)
