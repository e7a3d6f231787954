"""From the measurements of parallel code to the likely cause, in sentences; torch-free.

The first stage of a step in which a question finds something gives the conclusion: what differs
later follows from it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.verify.diagnose import diagnose
from titanlite.tools.verify.evidence import EXPLAINED, Evidence, pooled
from titanlite.tools.verify.gradients import explain_gradients, missing_sums
from titanlite.tools.verify.inputs import explain_shards, explain_start
from titanlite.tools.verify.passes import (
    explain_loss,
    explain_recomputation,
    outputs_agree,
    sums_of_output,
)
from titanlite.tools.verify.record import (
    LEFT,
    CodeRun,
    Fit,
    ModuleOutput,
    RankTrace,
    Shares,
    Update,
    WrongLine,
    WrongRows,
    is_input,
    module_of,
)
from titanlite.tools.verify.shares import NEAR, describe_parts, sums_of_parts
from titanlite.tools.verify.updates import (
    explain_buffers,
    explain_norm_alone,
    explain_replicas,
    explain_state,
    explain_update,
)
from titanlite.tools.verify.wording import (
    Explained,
    be,
    is_near,
    listed,
    name_factor,
    name_parameters,
    name_ranks,
)

MOST_LINES = 4


@dataclass
class PartEvidence(Evidence):
    """All measurements of parallel code that differs from its reference."""

    shares: Mapping[int, Mapping[str, Fit]] = field(default_factory=dict)
    """Rank -> gradient -> it as a sum of those of the parts, relative to the reference's."""
    weights: Shares = ()
    """Each part's share of the whole mean."""
    counts: Mapping[str, Shares] = field(default_factory=dict)
    """Tensor of the batch -> the number of its elements in each part."""
    parts: Sequence[tuple[Sequence[int], int | None]] = ()
    """For each part of the batch, the ranks that have it, and the number of the microbatch."""
    tied: Sequence[Sequence[str]] = ()
    """Names of one parameter of the reference."""
    events: Sequence[str] = ()
    """What modules receive and return, in the reference's forward order."""
    flow: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For each of these, those that it is computed from directly."""
    num_microbatches: int = 1
    first_microbatches: int = 1
    """Those of step 1."""
    changed: Sequence[str] = ()
    """The weights that the reference itself changes before its forward pass."""
    accumulated: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> how often a backward pass adds to its gradient in the reference."""
    rows: Mapping[int, Mapping[str, WrongRows]] = field(default_factory=dict)
    """Rank -> gradient -> the few rows of it that differ."""
    updates: Mapping[int, Mapping[str, Update]] = field(default_factory=dict)
    """Rank -> wrong weight -> what the step did to it."""
    watched: Sequence[CodeRun] = ()
    """The runs in which the lines of the caller's code were noted."""

    def factor(self, value: float, names: Iterable[str] = ()) -> str:
        """The degree or count that equals a factor of the gradients `names`, where it can be one.

        A degree can if these are all gradients, or just those that are placed in one way along its
        axis.
        """
        return name_factor(
            value, self._relevant(set(names)), num_microbatches=self.num_microbatches
        )

    def _relevant(self, wrong: set[str]) -> Grid:
        placed = {name: axes for run in self.runs for name, axes in run.placements.items()}
        if not wrong or wrong == placed.keys():
            return self.dims
        degrees = dict.fromkeys(self.dims.degrees, 1)
        for axis, degree in self.dims.degrees.items():
            ways = {placed[name].get(axis) for name in wrong & placed.keys()}
            others = {axes.get(axis) for name, axes in placed.items() if name not in wrong}
            if len(ways) == 1 and not ways & others:
                degrees[axis] = degree
        return Grid(**degrees)

    @property
    def following(self) -> Mapping[str, Sequence[str]]:
        """For each tensor, those that are computed from it directly."""
        found: dict[str, list[str]] = defaultdict(list)
        for event in self.events:
            for source in self.flow.get(event, ()):
                found[source].append(event)
        return found

    def ranks_with(self, has: Callable[[RankTrace], bool]) -> list[int]:
        return [trace.rank for trace in self.traces if has(trace)]

    def lines_before(self, event: str, ranks: Sequence[int], *, is_backward: bool = False) -> str:
        """The caller's lines that ran just before a tensor, or its gradient; "" for none."""
        for run in self.watched:
            if run.rank in ranks:
                lines = (run.lines_backward if is_backward else run.lines).get(event, ())
                return f": {listed(lines[-MOST_LINES:])}" if lines else ""
        return ""

    def describe_update(self) -> str:
        """What the optimizer's step does to the wrong weights, in a sentence; "" if unknown."""
        wrong = [one for of_rank in self.updates.values() for one in of_rank.values()]
        if not wrong:
            return ""
        if all(one.is_alone for one in wrong):
            return (
                "Each rank's new values are those that the step gives if its shard is taken for "
                "the whole tensor: this optimizer needs the whole tensor, so gather it before"
            )
        factor, left = pooled([one.decay for one in wrong])
        if left < EXPLAINED and factor:
            return (
                f"They differ by {factor:.4g} times the weights before the step: the weight decay "
                "of these parameters is not that on one process. Look at their parameter groups"
            )
        factor, left = pooled([one.fit for one in wrong])
        if left >= EXPLAINED or is_near(factor, 1.0):
            return ""
        same = self.factor(factor)
        return (
            f"The change of these weights is {factor:.6g} times that on one process"
            f"{f' ({factor:.6g} is {same})' if same else ''}: look at the "
            f"{'sign' if factor < 0 else 'scale'} of the update, and at the learning rate"
        )

    @property
    def wrong_line(self) -> WrongLine | None:
        return next((run.wrong_line for run in self.watched if run.wrong_line), None)

    def first_wrong_line(self) -> str:
        """The first line whose result is wrong, in a sentence; "" if none is known."""
        found = self.wrong_line
        if found is None:
            return ""
        start = f"the first line with another result than on one process is {found.line}"
        if found.only_here:
            shown = listed(found.only_here[-MOST_LINES:])
            return f"{start}. It reads what only the parallel code computes, in {shown}"
        if found.source:
            what = f"the result of {found.source}" * (found.source != found.line)
            return (
                f"{start}. It reads {what or 'a value of the same line'}, which each rank computes "
                f"from its own part: only the {found.way} over {found.axis} is right. Reduce it "
                f"over {found.axis} before it is used"
            )
        if found.is_moved:
            return (
                f"{start}: it has rows or columns of one process, but others than those that this "
                "rank's tokens have there, or in another order"
            )
        return start


def conclude(e: PartEvidence) -> list[str]:
    """What is wrong, the most likely cause first."""
    for stage in STAGES:
        if any(sentence for ask in stage for sentence in ask(e)):
            # That replicas differ follows from almost anything.
            splits = set(explain_replicas(e))
            return [sentence for sentence in diagnose(e, stage) if sentence not in splits]
    return diagnose(e, ())


def describe_event(event: str) -> str:
    """What a module receives or returns, in words."""
    call, _, argument = event.partition(" <- ")
    name = call or "the model"
    if not argument:
        return f"the output of {name}"
    return f"the input of {name}" if argument == "input" else f"the input {argument} of {name}"


def are_local(e: PartEvidence) -> bool:
    """Whether the wrong gradients are each rank's own, though the step keeps the replicas equal.

    Then the optimizer's step exchanges them, or what it makes of them.
    """
    wrong = e.failed("gradient")
    local = {name for found in missing_sums(e, wrong) for name in found.names}
    apart = {split.name for split in e.found.splits if split.step <= e.step}
    return bool(wrong) and local == set(wrong) and not local & apart


def explain_step_of_local_gradients(e: PartEvidence) -> Iterator[str]:
    if are_local(e) and e.failed("weight"):
        change = e.describe_update()
        yield (
            "each rank's gradients are its own, as if their sum were missing, but after the step "
            "the weights are equal on all ranks: the optimizer's step exchanges them. The weights "
            "are not those of one process, so what the step does with them is wrong"
            + (f". {change}" if change else ": look at what it averages, and by what it scales")
        )


def explain_start_of_code(e: PartEvidence) -> Iterator[str]:
    for sentence in explain_start(e):
        yield (
            f"{sentence}. If that is intended, copy_weights=True starts from the weights of the "
            "reference"
        )


def explain_cover(e: PartEvidence) -> Iterator[str]:
    """Samples of the batch that no rank reads, or that ranks with different parts read."""
    parts = {run.cells[max(1, e.step) - 1] for run in e.runs if isinstance(run, CodeRun)}
    if None in parts or not parts:
        return
    counts: Counter[int] = Counter()
    num_rows = num_columns = 0
    for part in parts:
        assert part is not None
        num_rows, num_columns, rows, columns = part
        if columns != tuple(range(num_columns)):
            return
        counts.update(rows)
    missed = [row for row in range(num_rows) if not counts[row]]
    often = [row for row in range(num_rows) if counts[row] > 1]
    of = f"of the batch of step {max(1, e.step)}"
    if missed and often:
        yield (
            f"the ranks read the wrong samples: {of}, "
            f"{_rows(missed)} {'are' if len(missed) > 1 else 'is'} read by no rank, and "
            f"{_rows(often)} by several. All ranks must take their parts from one order of the "
            "samples: look at the sampler, its seed and its rank"
        )
    elif often and len(often) < num_rows and any(map(e.failed, ("loss", "gradient"))):
        yield (
            f"the ranks read some samples twice: {of}, {_rows(often)} "
            f"{'are' if len(often) > 1 else 'is'} read by several, the others by one. Samples that "
            "fill up a part must not count in the loss: look at the sampler"
        )


def _rows(rows: Sequence[int]) -> str:
    words = f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:4]))}"
    return words + f" and {len(rows) - 4} more" * (len(rows) > 4)


def explain_changed(e: PartEvidence) -> Iterator[str]:
    """Weights that change between the optimizer's step and the next forward pass."""
    seen = {
        run.rank: run.changed[e.step]
        for run in e.runs
        if isinstance(run, CodeRun) and run.changed.get(e.step)
    }
    if not seen or e.changed or not any(map(e.failed, ("loss", "gradient", "weight"))):
        return
    names = {name for of_rank in seen.values() for name in of_rank}
    who = name_parameters(names, e.runs, "weight")
    before = f"step {e.step - 1} left them" if e.step > 1 else "they were at the start"
    yield (
        f"{who} {be(who)} changed before the forward pass of step {e.step}, "
        f"{name_ranks(seen, e.runs, range(len(e.runs)))}: not as {before}. Look for code that "
        "replaces weights (averaged weights, loading, a cast) and does not restore them"
    )


def explain_missing(e: PartEvidence) -> Iterator[str]:
    """Where the backward pass ends before it reaches all that the loss depends on."""
    if not e.failed("gradient"):
        return
    cut = [event for event in e.events if _any(e, event, lambda one: one.is_cut_off)]
    lost = [event for event in e.events if _any(e, event, lambda one: one.has_no_gradient)]
    if not cut and not lost:
        return
    event = cut[0] if cut else lost[-1]
    ranks = e.ranks_with(lambda t: event in t.events and t.events[event].has_no_gradient)
    where = name_ranks(ranks, e.runs, e.ranks_with(lambda t: event in t.events))
    if cut:
        sources = listed([describe_event(source) for source in e.flow.get(event, ())], 3)
        what = f"{describe_event(event)}{f', which is computed from {sources},' * bool(sources)} "
        what += f"requires no gradient, {where}, but does on one process"
        before = e.lines_before(event, ranks)
    else:
        readers = e.following.get(event, ())
        shown = listed([describe_event(reader) for reader in readers], 3) or "the loss"
        what = f"no gradient of {describe_event(event)} arrives from {shown}, {where}"
        before = e.lines_before(readers[0], ranks) if readers else ""
    yield (
        f"the backward pass is cut off: {what}. Look for a tensor that is detached, or a "
        f"collective that has no backward pass, in the code there{before}"
    )


def _any(e: PartEvidence, event: str, has: Callable[[ModuleOutput], bool]) -> bool:
    return any(event in trace.events and has(trace.events[event]) for trace in e.traces)


def explain_forward(e: PartEvidence) -> Iterator[str]:
    """The first tensor in forward order that differs, and between which others that happens."""
    wrong: dict[str, dict[int, ModuleOutput]] = defaultdict(dict)
    for trace in e.traces:
        for event, one in trace.events.items():
            if one.wrong_calls:
                wrong[event][trace.rank] = one
    order = [event for event in e.events if event in wrong]
    if not order or not any(map(e.failed, ("loss", "gradient"))):
        return
    moved = [
        event
        for event in order
        if all(o.is_moved and not o.elsewhere for o in wrong[event].values())
    ]
    first = next((event for event in order if event not in moved), order[0])
    outputs = wrong[first]
    holders = e.ranks_with(lambda t: first in t.events)
    where = name_ranks(outputs, e.runs, holders)
    known = [s for s in e.flow.get(first, ()) if any(s in trace.events for trace in e.traces)]
    module, one = module_of(first), next(iter(outputs.values()))
    inside = [s for s in known if not is_input(s) or module_of(s) != module]
    # Lines without a counterpart are named by what they are between.
    line = "" if e.wrong_line is None or e.wrong_line.only_here else e.first_wrong_line()
    lines = "" if line else e.lines_before(first, list(outputs))
    if is_input(first) or inside:
        sources = listed([describe_event(source) for source in known], 3)
        between = f"between {sources} and" if len(known) == 1 else f"after {sources}, and before"
        if sources:
            start = (
                f"the error is {between} {describe_event(first)}: that is the first tensor that "
                f"differs, {where}"
            )
        else:
            start = (
                f"{describe_event(first)} is the first tensor that differs, {where}, and no module "
                "runs before it"
            )
        parts = [start + (f". The code there{lines}" if lines else "")]
    else:
        parts = [
            f"{module or 'the model'} is the first module in forward order whose output differs, "
            f"{where}; every module before it agrees" + (", and so does its input" if known else "")
        ]
        if lines:
            parts.append(f"the code there{lines}")
    parts += [line] * bool(line)
    if not is_input(first) and not (e.wrong_line and e.wrong_line.source):
        parts += _own_part_alone(e, module, list(outputs))
    if e.reference_trace is not None and e.reference_trace.num_left_out:
        parts.append(f"{e.reference_trace.num_left_out} outputs were too large to compare")
    odd = [event for event in moved if e.events.index(event) < e.events.index(first)]
    if odd or first in moved:
        parts.append(
            f"{describe_event(odd[0] if odd else first)} has the rows or columns of one process in "
            "another order: if that is not intended, the error is there"
        )
    parts += _details(e, first, outputs, one)
    yield ". ".join(part[:1].upper() + part[1:] if i else part for i, part in enumerate(parts))


def _own_part_alone(e: PartEvidence, module: str, ranks: Sequence[int]) -> Iterator[str]:
    """Whether a module reads a part of what it reads on one process, and exchanges nothing."""
    given = [
        one
        for trace in e.traces
        for event, one in trace.inputs.items()
        if module_of(event) == module and trace.rank in ranks
    ]
    exchanges = any(module_of(call) == module for run in e.watched for call in run.communicating)
    if e.watched and given and not exchanges and all(one.is_part for one in given):
        yield (
            "it reads only this rank's part of what it reads on one process, and exchanges "
            "nothing: if it needs the rest (for a statistic, neighbours, earlier tokens), that is "
            "missing"
        )


def _details(
    e: PartEvidence, first: str, outputs: Mapping[int, ModuleOutput], one: ModuleOutput
) -> Iterator[str]:
    """What the numbers of the first tensor that differs show."""
    if not all(math.isfinite(output.agreement.aa) for output in outputs.values()):
        yield "it is not finite"
        return
    if len(one.wrong_calls) < one.num_calls:
        which = "microbatch" if len(one.wrong_calls) == 1 else "microbatches"
        yield (
            f"only {which} {listed(one.wrong_calls)} of {one.num_calls} "
            f"{'differs' if len(one.wrong_calls) == 1 else 'differ'} (counted from 0)"
        )
    if places := {output.elsewhere for output in outputs.values() if output.elsewhere}:
        yield f"it has {listed(sorted(places))}"
        return
    yield from sums_of_output(e, outputs)
    factor, left = pooled([output.agreement for output in outputs.values()])
    if left < EXPLAINED and not is_near(factor, 1.0):
        same = e.factor(factor)
        yield (
            f"it is {factor:.6g} times as large as on one process"
            f"{f' ({factor:.6g} is {same})' if same else ''}"
        )


def explain_ties(e: PartEvidence) -> Iterator[str]:
    """Parameters that are one tensor in the reference and several in the parallel code."""
    for names in e.tied:
        several = [n for n in names if any(n in run.placements for run in e.runs)]
        if len(several) > 1 and set(several) & set(e.failed("gradient")):
            yield (
                f"{listed(several)} are one parameter in the reference, but several in the "
                "parallel code: tie them, or add up their gradients"
            )


def explain_parts(e: PartEvidence) -> Iterator[str]:
    """Gradients that are sums over the ranks' parts of the batch, with wrong coefficients."""
    wrong = e.failed("gradient")
    if list(missing_sums(e, wrong)) and not _is_partly_reduced(e):
        return
    names, kind = [], "the ranks' parts of the batch"
    for ranks, index in e.parts:
        of = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
        names.append(of if index is None else f"microbatch {index} of {of}")
    if any(index is not None for _, index in e.parts):
        kind = "the microbatches"
    yield from sums_of_parts(
        e.runs,
        wrong,
        e.shares,
        lambda shares: describe_parts(shares, e.weights, names, e.counts),
        f"over {kind}",
    )


def _is_partly_reduced(e: PartEvidence) -> bool:
    """Whether some microbatches of other ranks count, and some do not."""
    for rank, of_rank in e.shares.items():
        others = [number for number, (ranks, _) in enumerate(e.parts) if rank not in ranks]
        for shares, left in of_rank.values():
            seen = {abs(shares[number]) > NEAR for number in others}
            if left < LEFT and len(seen) > 1:
                return True
    return False


def explain_accumulated(e: PartEvidence) -> Iterator[str]:
    """Gradients to which more backward passes add than on one process."""
    often: dict[str, set[float]] = defaultdict(set)
    for trace in e.traces:
        for name, number in trace.accumulated.items():
            if known := e.accumulated.get(name):
                often[name].add(number / known)
    wrong = set(e.failed("gradient"))
    if not wrong or not wrong < often.keys() or any(len(found) > 1 for found in often.values()):
        return
    own = {min(often[name]) for name in wrong}
    right = {min(found) for name, found in often.items() if name not in wrong}
    if len(own) == 1 and right and min(own) > max(right):
        who = name_parameters(wrong, e.runs, "gradient")
        yield Explained(
            f"{who} {be(who)} wrong because more than their own loss is in them: backward passes "
            f"add to them {min(own):g} times as often as on one process, and to the others "
            f"{max(right):g} times. Zero them between the backward passes of different losses, or "
            "keep the other loss from reaching these parameters",
            wrong,
        )


def explain_microbatches(e: PartEvidence) -> Iterator[str]:
    """A step with another number of microbatches, divided by that of step 1."""
    now, first = e.num_microbatches, e.first_microbatches
    if now == first or not e.failed("gradient"):
        return
    parts = [run.steps[e.step].gradients.get(n) for run in e.runs for n in e.failed("gradient")]
    factor, left = pooled([part for part in parts if part is not None])
    if left < EXPLAINED and is_near(factor, now / first):
        yield Explained(
            f"the gradients are {factor:.6g} times as large as on one process: step {e.step} has "
            f"{now} microbatches, and each counts 1/{first}, as in step 1 with its {first}. Divide "
            "by the number of microbatches, or of targets, of the same step",
            e.failed("gradient"),
        )


def explain_rows(e: PartEvidence) -> Iterator[str]:
    """Gradients of which only a few rows differ."""
    for name in e.failed("gradient"):
        found = {rank: of_rank[name] for rank, of_rank in e.rows.items() if name in of_rank}
        if not found:
            continue
        one = next(iter(found.values()))
        holders = [run.rank for run in e.runs if name in run.steps[e.step].gradients]
        how = ", which is zero there, but not on one process" * one.is_zero
        how += ", which is zero on one process" * one.should_be_zero
        rows = sorted({row for of_rank in found.values() for row in of_rank.rows})
        yield Explained(
            f"the gradient of {name} differs only in {_rows(rows)} of {one.number}{how}, "
            f"{name_ranks(found, e.runs, holders)}. Look at how these rows are chosen, and at "
            "what is special about them (padding, a boundary between shards)",
            [name],
        )


def explain_logarithm(e: PartEvidence) -> Iterator[str]:
    """A loss that is too large by the logarithm of a degree."""
    if not e.failed("loss"):
        return
    own, known = e.runs[0].steps[e.step].loss, e.reference[e.step].loss
    for axis, degree in e.dims.degrees.items():
        if degree > 1 and is_near(abs(own - known), math.log(degree)):
            often = "once too often" if own > known else "too seldom"
            yield (
                f"the loss is {own:.6g} instead of {known:.6g}, which differ by log({degree}), and "
                f"{degree} is the degree of {axis}: inside a logarithm (a logsumexp), a sum over "
                f"{axis} is taken {often}"
            )


def explain_backward(e: PartEvidence) -> Iterator[str]:
    """The first tensor in backward order whose gradient differs."""
    if not e.failed("gradient"):
        return
    wrong = [
        event
        for event in e.events
        if _any(e, event, lambda o: o.gradient is not None and o.gradient.error > 0)
    ]
    if not wrong:
        return
    # Partial gradients may be intended, until one is neither right nor a Partial.
    partial = {event: axis for event in wrong if (axis := _partial_over(e, event))}
    rest = [event for event in wrong if event not in partial]
    last = (rest or wrong)[-1 if rest else 0]
    found = {
        trace.rank: own
        for trace in e.traces
        if last in trace.events and (own := trace.events[last].gradient) and own.error > 0
    }
    where = name_ranks(found, e.runs, e.ranks_with(lambda t: last in t.events))
    following = e.following.get(last, ())
    from_partial = [other for other in following if other in partial]
    after = [other for other in following if other in _compared_backward(e)]
    shown = listed([describe_event(reader) for reader in from_partial or after], 3)
    start = f"in the backward pass, the gradient of {describe_event(last)} is the first that "
    start += f"differs, {where}"
    how = ""
    if not following:
        place = "The loss reads it, so the backward pass of the loss itself is wrong"
    elif from_partial:
        axis = partial[from_partial[0]]
        place = (
            f"The gradient of {shown} is correct after a sum over {axis}: it is still Partial over "
            f"{axis}. All-reduce it over {axis} between the two, in the backward pass"
        )
    elif last in partial:
        before = listed([describe_event(source) for source in e.flow.get(last, ())], 3)
        place = f"It is correct after a sum over {partial[last]}: it is still Partial over "
        place += f"{partial[last]}. All-reduce it over {partial[last]} there"
        place += f", or on the way back to {before}" if before else ""
    elif after and is_input(last):
        place = (
            f"{module_of(last) or 'The model'} returns it, from a gradient of {shown} that agrees"
        )
    elif after:
        place = f"The error is between it and {shown}, whose gradient agrees"
    else:
        place = "The code that reads it returns a wrong gradient"
    factor, left = pooled(list(found.values()))
    if left < EXPLAINED and not is_near(factor, 1.0):
        same = e.factor(factor)
        how = f"It is {factor:.6g} times as large as on one process"
        how += f" ({factor:.6g} is {same})" if same else ""
    lines = e.lines_before(last, list(found), is_backward=True)
    yield ". ".join(filter(None, [start, place, how, f"The code there{lines}" if lines else ""]))


def _partial_over(e: PartEvidence, event: str) -> str:
    """The axis over which the sum of a wrong gradient is right; "" for none."""
    sums = [t.summed_backward[event] for t in e.traces if event in t.summed_backward]
    for axis in e.dims.degrees:
        own = [of_rank[axis] for of_rank in sums if axis in of_rank]
        if own and all(one.difference < EXPLAINED for one in own):
            return axis
    return ""


def _compared_backward(e: PartEvidence) -> set[str]:
    return {event for t in e.traces for event, one in t.events.items() if one.gradient is not None}


def explain_loss_of_code(e: PartEvidence) -> Iterator[str]:
    """The loss, if all that the model returns agrees."""
    if outputs_agree(e) or not any(trace.events for trace in e.traces):
        line = e.first_wrong_line()
        for sentence in explain_loss(e):
            yield f"{sentence}. {line[:1].upper()}{line[1:]}" if line else sentence


STAGES: Sequence[Sequence[Callable[[PartEvidence], Iterable[str]]]] = (
    (explain_shards, explain_start_of_code),
    (explain_changed,),
    (explain_cover,),
    (explain_missing,),
    (explain_recomputation,),
    (explain_forward,),
    (explain_ties,),
    (explain_microbatches,),
    (explain_step_of_local_gradients,),
    (explain_parts,),
    (explain_logarithm,),
    (explain_loss_of_code,),
    (explain_backward,),
    (explain_rows,),
    (explain_accumulated,),
    (explain_gradients,),
    (explain_norm_alone,),
    (explain_update,),
    (explain_state, explain_buffers),
)
