"""The measurements of a plan that differs, and helpers that the questions of diagnose.py share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.config import ResolvedJob
from titanlite.mesh.parallel_dims import Grid, ParallelDims
from titanlite.tools.verify import record
from titanlite.tools.verify.jobs import microbatch_size
from titanlite.tools.verify.result import Result
from titanlite.tools.verify.wording import (
    Explained,
    be,
    beyond,
    distinct_texts,
    joined,
    listed,
    name_factor,
    name_parameters,
    name_ranks,
)

# A factor explains a difference if the residual is below this share of the whole.
EXPLAINED = 1e-6
# The largest difference of a gradient, or of a recomputed output, that agrees, in float64.
WRONG = 1e-9
MOST_LINES = 4
PADDING = (
    "rows or columns of padding beyond those of one process: mask them, or cut them off before"
)


@dataclass
class Evidence:
    """All measurements of a parallel run that differs, for a diagnosis."""

    dims: Grid
    reference: Sequence[record.ReferenceStep]
    runs: Sequence[record.RankRun]
    found: Result
    reference_trace: record.ReferenceTrace | None = None
    traces: Sequence[record.RankTrace] = ()
    watched: Sequence[record.RankTrace] = ()
    """Of ranks where the lines of the model's code were noted."""
    cured_by: Sequence[str] = ()
    """Settings with which the plan agrees, such as "compile.enable = false"."""
    is_split: bool = True
    """Whether a sum over ranks should give the loss: not so if all have the same batch."""

    completed: str = ""
    """The line whose result has to be reduced for the first wrong tensor, or the loss, to be right,
    in a sentence.
    """

    returned: str = ""
    """What has to be done with the part of the first wrong gradient that comes back through a line
    for it to be right, in a sentence.
    """

    passed_on: str = ""
    """Between which lines a gradient becomes wrong, in a sentence."""

    evaluates: bool = False
    """Whether the traces are of a validation, not of a step."""
    later: int | None = None
    """A step in which training differs, if before it only a validation does."""

    @property
    def step(self) -> int:
        """The first step in which something differs, or `later`."""
        if self.later is not None:
            return self.later
        # Replicas that differ from each other also differ from the reference, which is a failure.
        steps = [f.step for f in self.found.failures] or [s.step for s in self.found.splits]
        return min(steps, default=1)

    def failed(self, kind: str) -> list[str]:
        """The names of the tensors of this kind that differ at that step ("" for a number)."""
        return [f.name for f in self.found.failures if f.step == self.step and f.kind == kind]

    @property
    def knows_loss(self) -> bool:
        """Whether some rank has a loss of that step to compare."""
        runs = [run for run in self.runs if isinstance(run, record.CodeRun)]
        return not runs or any(run.losses[self.step - 1] is not None for run in runs)

    def describe_update(self) -> str:
        """What the optimizer's step does to the wrong weights, in a sentence; "" if unknown."""
        return ""

    def where(self, ranks: Collection[int], among: Collection[int] | None = None) -> str:
        """Words for some of all ranks, or of those `among` which they are."""
        return name_ranks(ranks, self.runs, range(len(self.runs)) if among is None else among)

    def named(self, names: Collection[str], what: str = "gradient") -> str:
        """Words for some parameters, or for their gradients."""
        return name_parameters(names, self.runs, what)

    def explained(self, names: Collection[str], are: str, more: Sequence[str] = ()) -> Explained:
        """A sentence that says what wrong gradients `are`, and explains `more` of them."""
        who = self.named(names)
        return Explained(f"{who} {be(who)} {are}", [*names, *more])

    def equals(self, value: float, form: str = " ({})") -> str:
        """Which degree or count a `factor` equals, in this form of words; "" for none."""
        same = self.factor(value)
        return form.format(f"{value:.6g} is {same}") if same else ""

    @property
    def forward_order(self) -> Sequence[str]:
        """The reference's modules, in the order in which their forward calls end."""
        return () if self.reference_trace is None else self.reference_trace.modules

    @property
    def events(self) -> Sequence[str]:
        """What the reference's modules receive and return, in forward order."""
        return () if self.reference_trace is None else self.reference_trace.events

    @property
    def flow(self) -> Mapping[str, Sequence[str]]:
        """For each of these, those that it is computed from directly."""
        return {} if self.reference_trace is None else self.reference_trace.flow

    @property
    def following(self) -> Mapping[str, Sequence[str]]:
        """For each of these, those that are computed from it directly."""
        found: dict[str, list[str]] = defaultdict(list)
        for event in self.events:
            for source in self.flow.get(event, ()):
                found[source].append(event)
        return found

    def ranks_with(self, has: Callable[[record.RankTrace], bool]) -> list[int]:
        """The traced ranks for which something holds."""
        return [trace.rank for trace in self.traces if has(trace)]

    def lines_before(self, event: str, ranks: Sequence[int], *, is_backward: bool = False) -> str:
        """The lines of code that ran just before a tensor, or its gradient; "" for none."""
        lines = self.lines_of(event, ranks, is_backward=is_backward)
        return f": {listed(lines[-MOST_LINES:])}" if lines else ""

    def lines_of(
        self, event: str, ranks: Sequence[int], *, is_backward: bool = False
    ) -> tuple[str, ...]:
        """The same lines, one by one."""
        for trace in self.watched:
            if trace.rank in ranks:
                lines = (trace.lines_backward if is_backward else trace.lines).get(event, ())
                if not lines and is_backward:
                    lines = self._lines_beside(event, trace)
                # That it begins says nothing of where in it.
                return tuple(line for line in lines if not line.endswith(".backward())"))
        return ()

    def _lines_beside(self, event: str, trace: record.RankTrace) -> tuple[str, ...]:
        """The lines of a backward pass that were noted at another tensor, which it gives, too.

        That is read by the same code, or is the input of the module that reads the tensor.
        """
        readers = set(self.following.get(event, ()))
        modules = {record.module_of(reader) for reader in readers}
        # The first also has lines of all that comes after these modules.
        for other, lines in [*trace.lines_backward.items()][1:]:
            is_same = record.is_input(other) and other not in self.events
            if readers & {*self.following.get(other, ())} or (
                is_same and record.module_of(other) in modules
            ):
                return lines
        return ()

    def wrong_line(self, event: str = "") -> record.WrongLine | None:
        """The first wrong line; for an event, one that can make it wrong.

        That is not in a module whose output agrees, nor outside the one whose output the event is.
        """
        every = [trace.events for trace in self.traces]
        for line in (line for trace in self.watched for line in trace.wrong_lines):
            own = [events[line.call] for events in every if line.call in events]
            agrees = own and not any(one.wrong_calls or one.is_other for one in own)
            module = record.module_of(line.call)
            inside = record.module_of(event) in (module, *record.around(module))
            if not event or (not agrees and (inside or record.is_input(event))):
                return line
        return None

    def first_wrong_line(self, event: str = "") -> str:
        """The first line whose result is wrong, in a sentence; "" if none is known."""
        found = self.wrong_line(event)
        return "" if found is None else self.describe_line(found)

    def describe_line(self, found: record.WrongLine) -> str:
        """A line whose result is wrong, in a sentence."""
        parts = [self._wrong_line(found)]
        if found.border:
            parts.append(f"It differs only {beyond(found.border)}")
        if found.is_random:
            parts.append(
                "It draws random numbers, others than one process has for this rank's samples: "
                "draw them for the whole batch and take the rank's part, or seed them by the sample"
            )
        for name, own, known in found.numbers:
            later = ". Step 1 was right: is it set from the samples of all ranks?" * (self.step > 1)
            parts.append(f"It computes {name} {own:.6g}, on one process {known:.6g}{later}")
        parts += [f"It takes the {found.over}"] * bool(found.over)
        if found.never_here and not found.source:
            lines = listed(found.never_here[-MOST_LINES:])
            parts.append(f"On one process it reads the result of {lines}, which does not run here")
        return joined(*parts)

    def arranged(self, line: record.WrongLine) -> str:
        """Whether a wrong line only arranges what modules return that agree; "" if not."""
        known = {c: t.events[c] for t in self.traces for c in line.arranges if c in t.events}
        if not line.arranges or len(known) < len(line.arranges):
            return ""
        if any(one.wrong_calls or one.is_other for one in known.values()):
            return ""
        return (
            f"between there is only a new order of the output of {listed(line.arranges)}, which "
            "agrees: it is split, or put together, otherwise than on one process"
        )

    def _wrong_line(self, found: record.WrongLine) -> str:
        start = f"the first line with another result than on one process is {found.line}"
        if found.instead:
            start = f"the first line that reads something else is {found.line}: the result of "
            return start + ", on one process that of ".join(found.instead)
        if found.shift:
            where = f"{abs(found.shift)} {'further on' if found.shift > 0 else 'before'}"
            return (
                f"{start}: it has the tokens of one process that are {where} than this rank's. Is "
                "it shifted twice, before the sequence is cut and after, or counted from another "
                "place?"
            )
        only_here = listed(found.only_here[-MOST_LINES:])
        if found.is_moved:
            how = f"{start}: it has rows or columns of one process, but others than those that "
            how += "this rank's tokens have there, or in another order"
            if only_here:
                how += f". Only the parallel code puts them together, in {only_here}: what counts "
                how += "them, such as labels, must follow that order"
            return how
        if found.rows:
            return (
                f"{start}: it has {found.rows}. Does what it reads belong to that one, written too "
                "early, or over what this one still needs?"
                if "microbatch" in found.rows
                else f"{start}: it has {found.rows}. Is it counted, or drawn, from the place of "
                "the first rank?"
            )
        if found.only_here and not found.source:
            if found.order:
                return (
                    f"{start}. What it reads has the elements that one process reads there, "
                    f"{found.order}. Only the parallel code computes it, in {only_here}"
                )
            return f"{start}. It reads what only the parallel code computes, in {only_here}"
        if found.source:
            what = f"the result of {found.source}" * (found.source != found.line)
            if found.mixed is not None and "mean" in found.way + found.mixed[1]:
                other = f"the result of {found.mixed[0]}" * (found.mixed[0] != found.line)
                return (
                    f"{start}. It reads two values that need different reductions: {found.way} "
                    f"makes {what or 'a value of this line'} right, {found.mixed[1]} makes "
                    f"{other or 'a value of this line'} right. Reduce them before, or scale one of "
                    "them"
                )
            how = ". Reduce it before it is used"
            if found.is_alike:
                return (
                    f"{start}. What it reads has been exchanged, and all ranks have it alike, but "
                    f"only {found.way} is right: it is a mean, and one process has the sum. Use "
                    "the sum here, or divide later"
                )
            if found.summed_by:
                how = f", but {found.summed_by} sums it with that to which it is added, which each "
                how += (
                    "rank has whole: that counts once for each rank. Reduce it before it is added"
                )
            if found.too_narrow:
                how = ", but {} reduces it over {} alone".format(*found.too_narrow)
            return (
                f"{start}. It reads {what or 'a value of the same line'}, which each rank computes "
                f"from its own part: only {found.way} is right{how}"
            )
        if found.unlike:
            return (
                f"{start}. What it reads is of different rows: those of the result of "
                f"{found.unlike} are of other tokens than what it is used with. Put both into one "
                "order (batch first or sequence first), and cut both at the same places"
            )
        if found.is_of_padded:
            return f"{start}. What it reads agrees, but has {PADDING}"
        if found.is_of_part:
            why = "if the line needs the rest (a statistic, a running sum, neighbours), that is "
            why += "missing"
            if found.is_causal:
                why = "is_causal counts its queries and keys from the first of them, wherever they "
                why += "begin in the sequence: give a mask instead"
            return f"{start}. What it reads agrees, but is only this rank's part: {why}"
        return start

    @property
    def parameter_order(self) -> dict[str, int]:
        """Parameter -> index of its module in forward order, for the modules in that order."""
        place = {module: index for index, module in enumerate(self.forward_order)}
        names = {name for run in self.runs for name in run.placements}
        return {name: place[m] for name in names if (m := holder_of(name)) in place}

    def factor(self, value: float, names: Iterable[str] = ()) -> str:
        """The degree or count of the run that `value` equals, in words; "" for none.

        `names` are the gradients that have this factor.
        """
        return name_factor(value, self.dims)


@dataclass
class JobEvidence(Evidence):
    """All measurements of a job's plan that differs, for `diagnose`."""

    dims: ParallelDims
    job: ResolvedJob = field(kw_only=True)

    @property
    def batch(self) -> int:
        """Sequences of the step that differs, over all ranks."""
        return self.job.num_sequences(max(1, self.step), max(1, self.step))

    @property
    def num_microbatches(self) -> int:
        """Microbatches per rank in that step."""
        return self.batch // self.job.dims.dp // microbatch_size(self.job)

    def factor(self, value: float, names: Iterable[str] = ()) -> str:
        return name_factor(
            value,
            self.dims,
            num_microbatches=self.num_microbatches,
            num_targets=self.reference[max(1, self.step)].num_targets,
            batch=self.batch,
        )


def holder_of(parameter: str) -> str:
    """The module that holds a parameter."""
    return parameter.rpartition(".")[0]


def pooled(parts: Sequence[record.Agreement]) -> tuple[float, float]:
    """The factor that fits all parts best, and the largest relative residual of any part."""
    bb, ab = sum(p.bb for p in parts), sum(p.ab for p in parts)
    if bb == 0.0 or not math.isfinite(bb + ab + sum(p.aa for p in parts)):
        return 0.0, math.inf
    factor = ab / bb
    left = 0.0
    for part in parts:
        residual = part.aa - 2 * factor * part.ab + factor * factor * part.bb
        size = max(part.aa, factor * factor * part.bb, part.bb)
        # A rounding error of 1e-16 in the residual becomes 1e-8 under the root.
        left = max(left, (max(0.0, residual) / size) ** 0.5 if size else 0.0)
    return factor, 0.0 if left < 3e-7 else left


def worst(run: record.RankRun, tensors: str, step: int, names: Sequence[str]) -> float:
    """One rank's largest difference in the named tensors ("gradients", "weights") of a step."""
    found = getattr(run.steps[step], tensors)
    return max((found[name].difference for name in names if name in found), default=0.0)


def ranks_of(e: Evidence, difference: Callable[[record.RankRun], float]) -> list[int]:
    """The ranks whose difference is within a factor of 1e4 of the largest."""
    values = {run.rank: difference(run) for run in e.runs}
    largest = max(values.values())
    return [rank for rank, value in values.items() if value > 0 and value >= 1e-4 * largest]


def by_rank(e: Evidence, number: Callable[[record.RankStep], float]) -> str:
    """Numbers that differ between ranks, each with the ranks that have it."""
    ranks: dict[float, list[int]] = defaultdict(list)
    for run in e.runs:
        ranks[number(run.steps[e.step])].append(run.rank)
    shown = zip(distinct_texts(*ranks), ranks.values(), strict=True)
    return listed((f"{value} {e.where(own)}" for value, own in shown), 3)
