"""Where what modules receive and return first differs, or its gradient; torch-free.

Between two such tensors there is a module, or code between modules. The sentences are the same for
jobs and for other code.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from titanlite.tools.verify.evidence import (
    EXPLAINED,
    MOST_LINES,
    Evidence,
    JobEvidence,
    holder_of,
    pooled,
)
from titanlite.tools.verify.record import (
    Agreement,
    CodeRun,
    ModuleOutput,
    RankTrace,
    around,
    called_by,
    is_input,
    module_of,
)
from titanlite.tools.verify.wording import agree, beyond, is_near, joined, listed, times

UNSEEN = (
    "a collective such as dist.all_reduce is not seen by autograd, so the gradient through it is "
    "not exchanged. Use one with a backward pass, as in torch.distributed.nn.functional"
)
PLACE = re.compile(r"at (\d+)(?: to (\d+))? of (\d+) along dimension (\d+)")
"""Where a tensor differs (ModuleOutput.places)."""


def first_wrong(e: Evidence) -> str:
    """The first tensor in forward order that differs; "" for none."""
    wrong = {event for t in e.traces for event, one in t.events.items() if one.wrong_calls}
    return next((event for event in e.events if event in wrong), "")


def first_difference(e: Evidence) -> Iterator[str]:
    """The first tensor in forward order that differs, and between which others that happens."""
    wrong: dict[str, dict[int, ModuleOutput]] = defaultdict(dict)
    for trace in e.traces:
        for event, one in trace.events.items():
            if one.wrong_calls:
                wrong[event][trace.rank] = one
    order = [event for event in e.events if event in wrong]
    if not order or (isinstance(e, JobEvidence) and not outputs_differ(e)):
        return
    moved = [
        event
        for event in order
        if all(o.is_moved and not o.elsewhere for o in wrong[event].values())
    ]
    first = next((event for event in order if event not in moved), order[0])
    outputs = wrong[first]
    # Indices have no rows that could be found: what is looked up with them shows their order.
    in_order = {e for e in order if not all(o.is_moved for o in wrong[e].values())}
    in_order -= {e for e in in_order if is_input(e) and called_by(e) in wrong.keys() - in_order}
    if not in_order and len(order) > 1:
        # A loss that agrees was computed in the same order.
        if e.failed("loss") or not e.knows_loss:
            yield _moved_to_the_end(e, order, outputs)
        return
    start, is_between = _start(e, first, outputs)
    parts = [start]
    # A line without a counterpart is named by what it is between.
    wrong_line = e.wrong_line(first)
    has_place = wrong_line is None or bool(wrong_line.only_here and not wrong_line.source)
    has_place = has_place or any(output.shape for output in outputs.values())
    arranged = "" if wrong_line is None else e.arranged(wrong_line)
    line = "" if has_place or arranged else e.first_wrong_line(first)
    code = e.lines_before(first, list(outputs))
    if (
        wrong_line is not None
        and wrong_line.call == called_by(first) != first
        and (before := e.lines_of(first, list(outputs)))
        and wrong_line.only_here[-len(before) :] == before
    ):
        code = f": {listed(wrong_line.only_here[-MOST_LINES:])}"
    if arranged and wrong_line is not None:
        lines_there = listed((*wrong_line.only_here[-MOST_LINES:], wrong_line.line))
        code = joined(f": {lines_there}", arranged)
    line = e.completed or line
    if _is_outdated(e, first, outputs):
        line = ""
    is_said = not (line or code) or _carried(e, first, outputs)
    lines = [] if is_said else [line or f"the code there{code}"]
    parts += lines * is_between
    if e.reference_trace is not None and e.reference_trace.num_left_out:
        parts.append(f"{e.reference_trace.num_left_out} tensors were too large to compare")
    odd = [event for event in moved if e.events.index(event) < e.events.index(first)]
    copies = list(_copies(e, outputs))
    parts += copies
    if (odd or first in moved) and not copies:
        parts.append(
            f"{describe_event(odd[0] if odd else first)} has the rows or columns of one process in "
            "another order: if that is not intended, the error is there"
        )
    how = list(_how_it_runs(e, first, outputs)) or list(_one_sided(e, first, outputs, line))
    details = how or list(_details(e, first, outputs)) or list(_other_samples(e, first))
    parts += details
    some = [output.tokens for output in outputs.values() if output.tokens][:1]
    parts += (_in_other_calls(*one, _right_positions(e, first)) for one in some)
    parts += _of_module(e, first, outputs)
    parts += [] if how else _of_buffers(e, module_of(first))
    parts += lines * (not is_between)
    if not is_input(first) and not line and not details:
        parts += _own_part_alone(e, module_of(first), list(outputs))
    yield joined(*parts)


def _moved_to_the_end(e: Evidence, order: Sequence[str], outputs: Collection[int]) -> str:
    """Tokens in an order that may be meant, of which nothing else is wrong."""
    first, last = order[0], order[-1]
    where = e.where(outputs, e.ranks_with(lambda t: first in t.events))
    for line in (line for trace in e.watched for line in trace.numbers if e.failed("loss")):
        ((what, own, known),) = line.numbers
        return (
            f"{line.line} computes {what} {own:.6g}, on one process {known:.6g}: does it count "
            "what the rank, or the microbatch, has of its own? Up to there everything is right, "
            "with rows or columns in another order"
        )
    return (
        f"from {describe_event(first)} to {describe_event(last)} everything is right, {where}, but "
        "has the rows or columns of one process in another order. If that order is intended, what "
        f"reads {describe_event(last)} takes them for those of one process: put them back in order "
        "there, or give the targets the same order. If not, the error is in the code before "
        f"{describe_event(first)}{e.lines_before(first, list(outputs))}"
    )


def _start(e: Evidence, first: str, outputs: Mapping[int, ModuleOutput]) -> tuple[str, bool]:
    """Where the first tensor that differs is, and whether that is not inside a module."""
    where = e.where(outputs, e.ranks_with(lambda t: first in t.events))
    name, module = describe_event(first), module_of(first)
    before = e.events[: e.events.index(first)]
    known = _sources(e, first)
    if isinstance(e, JobEvidence) and (idle := _never_run(e, before)):
        what = f"{name}, which comes later, is the first tensor that differs"
        if not is_input(first):
            what = f"{module or 'the model'}, which comes later, is the first module whose output "
            what += "differs"
        never = f"{listed(idle, 3)} never {agree('the' * (len(idle) == 1), 'run')}"
        return f"{never}, and {what}, {where}", True
    if known and (is_input(first) or any(not is_input(s) or module_of(s) != module for s in known)):
        sources = listed([describe_event(source) for source in known], 3)
        between = f"between {sources} and" if len(known) == 1 else f"after {sources}, and before"
        what = f"the error is {between} {name}: that is the first tensor that differs, {where}"
        return what, True
    if is_input(first) and not module:
        what = f"{name} is the first tensor that differs, {where}, and no module runs before it"
        return what, True
    unlike, seen = set[str](), set(map(module_of, compared(e)))
    if isinstance(e, JobEvidence):
        unlike = {module_of(call) for call in before if not is_input(call)} - seen
    shown = " that was compared" * bool(unlike) + " agrees"
    shown += f" ({_not_compared(unlike)})" if unlike else ""
    if is_input(first):
        what = f"{name} is the first tensor that differs, {where}; every module before it{shown}"
        return what, True
    what = f"{module or 'the model'} is the first module in forward order whose output differs, "
    what += f"{where}; every module before it{shown}" + ", and so does its input" * bool(known)
    return what, False


def _sources(e: Evidence, event: str) -> list[str]:
    """The compared tensors that an event is computed from."""
    can_compare = {event for trace in e.traces for event in trace.events}
    return [source for source in e.flow.get(event, ()) if source in can_compare]


def _right_positions(e: Evidence, first: str) -> str:
    """What follows from the positions of tokens, before a tensor, and agrees; "" for nothing."""
    for event in e.events[: e.events.index(first)]:
        name = module_of(event).rpartition(".")[2]
        own = [t.events[event] for t in e.traces if event in t.events]
        if own and not is_input(event) and ("rotary" in name or "position" in name):
            return "" if any(one.wrong_calls for one in own) else describe_event(event)
    return ""


def _in_other_calls(num_padding: int, number: int, positions: str) -> str:
    if positions and not num_padding:
        return (
            "one process has these tokens as sequences of their own, and here they are together. "
            f"Their positions are right ({positions} agrees), so tokens of different sequences "
            "attend to each other: look at the attention mask"
        )
    how = f"with padding ({num_padding} of {number} tokens)" if num_padding else "together"
    return (
        f"one process has these tokens as sequences of their own, and here they are {how}: look at "
        "the positions that they have (position_ids), and at what they read (the attention mask)"
    )


def _details(e: Evidence, first: str, outputs: Mapping[int, ModuleOutput]) -> Iterator[str]:
    """What the numbers of the first tensor that differs show."""
    one = next(iter(outputs.values()))
    infinite = [o for o in outputs.values() if not math.isfinite(o.agreement.aa)]
    if infinite and all(math.isfinite(output.agreement.bb) for output in infinite):
        yield "it is not finite"
        return
    if cut := next((output.cut for output in outputs.values() if output.cut), ""):
        yield (
            f"its shape is {cut}: a pipeline cuts what it is given into microbatches, and takes "
            "this for rows of the batch. Give it a dimension of the batch, or replicate it"
        )
        return
    if all(output.of_others for output in outputs.values()):
        yield (
            f"its values are right for {listed(one.of_others, 3)} on one process: they are dealt "
            "out in another order than what belongs to them. Order both by the same permutation"
        )
        return
    if len(one.wrong_calls) < one.num_calls:
        is_one = len(one.wrong_calls) == 1
        yield (
            f"only microbatch{'' if is_one else 'es'} {listed(one.wrong_calls)} of {one.num_calls} "
            f"{'differs' if is_one else 'differ'} (counted from 0)" + _carried(e, first, outputs)
        )
    if _is_outdated(e, first, outputs):
        yield (
            f"it is right for the weights of before the update of step {e.step - 1}: a copy of them"
            " (gathered, cast) is still in use. Make it anew after each update"
        )
    yield from _moved_in_order(e, first, outputs)
    yield from _run_twice(e, first)
    if places := {output.elsewhere for output in outputs.values() if output.elsewhere}:
        # Rows or columns in another order say how; positions say what the module was given.
        if one.is_moved:
            yield f"it has {listed(sorted(places))}"
            return
        who, what = ("it", "code there") if is_input(first) else ("the output", "module")
        yield (
            f"{who} is correct for {listed(sorted(places))}: the {what} is given, or computes, the "
            "wrong positions or offset. Give it the positions of the rank's own tokens"
        )
    yield from sums_of_output(e, outputs)
    if all(one.has_other_rows for one in outputs.values()):
        yield (
            "each of its rows is a multiple of another row of one process: results are put back in "
            "another order than that of the tokens, as by a permutation in place of its inverse"
        )
    if all(one.has_scaled_rows for one in outputs.values()):
        yield (
            "some of its rows are those of one process times a number of their own, and the others "
            "agree: the weights of these are incomplete, or too many (one written over another "
            "instead of added to it, or counted twice)"
            if all(one.places for one in outputs.values())
            else "each of its rows is that of one process times a number of its own: rows are "
            "weighted or normalized at another place than there, as before a module instead of "
            "after it"
        )
    if one.scales and len({output.scales for output in outputs.values()}) == 1:
        yield f"it is {one.scales} as large as on one process"
    else:
        yield from _where(e, {rank: output.places for rank, output in outputs.items()})
    if not e.completed:
        yield from _at_border(outputs)
    if shape := next((output.shape for output in outputs.values() if output.shape), ""):
        what = "the layout in which it is given" if is_input(first) else "its output layout"
        yield f"its local shape is {shape}: correct {what}"
    factor, left = pooled([output.agreement for output in outputs.values()])
    if left < EXPLAINED and not is_near(factor, 1.0):
        yield f"it is {times(factor)} as large as on one process{e.equals(factor)}"


def _is_outdated(e: Evidence, first: str, ranks: Collection[int]) -> bool:
    """Whether a tensor that differs is right for the weights of before the last update."""
    return {*ranks} <= {t.rank for t in e.watched if first in t.outdated}


def _carried(e: Evidence, first: str, ranks: Collection[int]) -> str:
    """What a microbatch reads that an earlier one has left, where a tensor differs; or ""."""
    calls = [called_by(first), *reversed(around(module_of(first)))]
    found = [
        t.carried[call] for t in e.watched if t.rank in ranks for call in calls if call in t.carried
    ]
    if not found:
        return ""
    line, source, writes = found[0]
    why = "keep one of its own for each microbatch"
    if writes:
        why = "change it once a step, after the last microbatch, from what all of them have"
    return f". There {line} reads what an earlier microbatch has left in {source}: {why}"


def _how_it_runs(e: Evidence, first: str, ranks: Collection[int]) -> Iterator[str]:
    """Whether a module runs in another mode than on one process, or what is in it never runs."""
    known, module = e.reference_trace, module_of(first)
    if known is None or is_input(first) or isinstance(e, JobEvidence):
        return
    own = [trace for trace in e.traces if trace.rank in ranks]
    if module not in known.evaluating and all(module in trace.evaluating for trace in own):
        yield (
            "it is in evaluation mode, and on one process in training mode: train() is not called, "
            "or is called before eval()"
        )
    # What has weights may be computed from them elsewhere.
    others = {holder_of(name) for run in e.runs for name in run.placements}
    idle = [name for name in own[0].idle if name.startswith(f"{module}.") and name not in others]
    if idle := [name for name in idle if name in e.forward_order]:
        yield f"inside it, {listed(idle, 3)} {'run' if idle[1:] else 'runs'} only on one process"


def _one_sided(e: Evidence, first: str, ranks: Collection[int], said: str) -> Iterator[str]:
    """What one side alone computes where a tensor differs, unless that is `said`."""
    call = around(module_of(first))[-1] if is_input(first) and module_of(first) else first
    yield from (
        text for text in one_sided(e, call, ranks) if text.partition(", in ")[2] not in said
    )


def one_sided(e: Evidence, call: str, ranks: Collection[int]) -> Iterator[str]:
    """What the code of a call computes on one process alone, or on ranks alone."""
    own = [trace for trace in e.watched if trace.rank in ranks]
    for operator, line in [t.left_out[call] for t in own if call in t.left_out][:1]:
        yield f"one process computes {operator} there, and these ranks do not, in {line}"
    for operator, line in [t.added[call] for t in own if call in t.added][:1]:
        yield f"these ranks compute {operator} there, and one process does not, in {line}"


def _where(e: Evidence, places: Mapping[int, str]) -> Iterator[str]:
    """Where a tensor differs, if that is a part of one dimension on every rank."""
    if not places or not all(places.values()):
        return
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, place in places.items():
        ranks[place].append(rank)
    shown = [f"{place}, {e.where(own, places)}" for place, own in ranks.items()]
    yield f"it differs only {listed(shown if len(ranks) > 1 else ranks, 3)}"


def _copies(e: Evidence, outputs: Mapping[int, ModuleOutput]) -> Iterator[str]:
    """Whether some rows differ, and ranks with other samples have rows in common."""
    step = max(1, e.step) - 1
    runs = {run.rank: run for run in e.runs if isinstance(run, CodeRun)}
    for rank, one in outputs.items():
        at, own = PLACE.match(one.places), runs[rank].cells[step] if rank in runs else None
        others = [(run.parts[step], run.cells[step]) for r, run in runs.items() if r not in outputs]
        if (
            not own
            or not at
            or int(at[4])
            or not any(
                theirs
                and part != runs[rank].parts[step]
                and own[3] == theirs[3]
                and {*own[2]} & {*theirs[2]}
                for part, theirs in others
            )
        ):
            return
    yield (
        "ranks have rows in common: these are copies of another rank's (a halo), and lack what "
        "they are computed from. Leave them out of what is computed of all rows, such as the loss"
    )


def _at_border(outputs: Mapping[int, ModuleOutput]) -> Iterator[str]:
    """Whether parts of a tensor, longer than three, differ only where they begin, or end."""
    found = [(one, PLACE.match(one.places)) for one in outputs.values()]
    if not all(at and int(at[3]) > 3 and int(at[4]) in one.cut_dims for one, at in found):
        return
    places = [[int(n or at[1]) for n in at.groups()[:3]] for _, at in found if at]
    for is_there, where in (
        (all(first == 0 for first, _, _ in places), "begins"),
        (all(last == size - 1 for _, last, size in places), "ends"),
    ):
        if is_there:
            yield f"that is {beyond(where)}"
            return
    if all(first == 0 or last == size - 1 for first, last, size in places):
        yield (
            "these are the borders between the ranks' parts: not all that is needed there of the "
            "neighbours arrives, as where a halo is too narrow (it grows with the dilation)"
        )


def _other_samples(e: Evidence, first: str) -> Iterator[str]:
    """Whether ranks join what they compute of other samples with shards of a module, in step 1."""
    module = module_of(first)
    is_cut = any(
        "sharded" in axes.values()
        for run in e.runs
        for name, axes in run.placements.items()
        if holder_of(name) == module
    )
    groups = {
        group
        for trace in e.watched
        for call, of_call in trace.groups.items()
        for group in of_call
        if module_of(call) == module
    }
    for group in sorted(groups) if is_cut and not is_input(first) and e.step < 2 else ():
        runs = [run for run in e.runs if run.rank in group and isinstance(run, CodeRun)]
        if len({run.parts[max(1, e.step) - 1] for run in runs}) > 1:
            yield (
                f"ranks {listed(group)} have shards of it and join what they compute, but do not "
                "read the same samples, which they must: split the batch over the other ranks only"
            )
            return


def _own_part_alone(e: Evidence, module: str, ranks: Sequence[int]) -> Iterator[str]:
    """Whether a module reads a part of what it reads on one process, and exchanges nothing."""
    given = [
        one
        for trace in e.traces
        for event, one in trace.events.items()
        if is_input(event) and module_of(event) == module and trace.rank in ranks
    ]
    exchanges = any(module_of(call) == module for trace in e.watched for call in trace.groups)
    if e.watched and given and not exchanges and all(one.is_part for one in given):
        yield (
            "the module reads only this rank's part of what it reads on one process, and exchanges "
            "nothing: if it needs the rest (for a statistic, neighbours, earlier tokens), that is "
            "missing"
        )


def _of_module(e: Evidence, first: str, outputs: Collection[int]) -> Iterator[str]:
    """What a job's plan has for the first module whose output differs."""
    module = module_of(first)
    if is_input(first):
        return
    holders = e.ranks_with(lambda t: first in t.events)
    has_weights = any(holder_of(name) == module for run in e.runs for name in run.placements)
    has_cp = e.dims.degrees.get("cp", 1) > 1 and "att" in module.lower() and not has_weights
    if style := next((t.styles[module] for t in e.traces if module in t.styles), ""):
        yield f"its entry in the tensor-parallel plan is {style}"
    elif has_cp and isinstance(e, JobEvidence) and len(outputs) < len(holders):
        yield (
            "other cp ranks agree, so this rank misses some of their keys and values, or uses some "
            "twice"
        )
    elif has_cp and any(t.events[first].differs_from_jump for t in e.traces if first in t.events):
        yield (
            "it is correct up to where a rank's positions jump: the attention to other ranks' "
            "blocks is wrong, or a mask that is made from positions treats the jump as the start "
            "of a document"
        )


def _of_buffers(e: Evidence, module: str) -> Iterator[str]:
    """Buffers of the first module whose output differs that are not those of one process."""
    wrong = [f for f in e.found.failures if f.kind == "buffer" and holder_of(f.name) == module]
    for one in wrong[:1]:
        buffers = {r.rank: b for r in e.runs if (b := r.steps[one.step].buffers.get(one.name))}
        is_zero = any(buffer.error and not buffer.aa for buffer in buffers.values())
        how = "is zero" if is_zero else f"differs by {one.difference:.1e}"
        right = [rank for rank, buffer in buffers.items() if not buffer.error]
        if right:
            how += f", but is right {e.where(right, buffers)}"
        look = "look at how it is filled, or cast"
        if len({buffer.digest for buffer in buffers.values()}) > 1:
            look = "ranks hold different values, so broadcast it, or draw it with one seed"
            steps = ((r.rank, s.buffers.get(one.name)) for r in e.runs for s in r.steps)
            if len({(rank, buffer.digest) for rank, buffer in steps if buffer}) > len(buffers):
                look = "each step changes it, and ranks hold different values. What it keeps of "
                look += "the batch must reach all ranks that read it, so reduce its statistics"
        yield f"its buffer {one.name} {how}, unlike on one process: {look}"


def describe_event(event: str) -> str:
    """What a module receives or returns, in words."""
    call, _, argument = event.partition(" <- ")
    name = call or "the model"
    if not argument:
        return f"the output of {name}"
    return f"the input of {name}" if argument == "input" else f"the input {argument} of {name}"


def outputs_agree(e: Evidence) -> bool:
    """Whether outputs were recorded and all of them agree."""
    return any(trace.modules for trace in e.traces) and not outputs_differ(e)


def outputs_differ(e: Evidence, module: str | None = None) -> bool:
    """Whether any recorded output, or that of this module, differs on any rank."""
    if module is None:
        return bool(wrong_outputs(e))
    return any(trace.modules[module].wrong_calls for trace in e.traces if module in trace.modules)


def wrong_outputs(e: Evidence) -> list[str]:
    """The calls whose outputs differ, in forward order, without those that hold another part."""
    wrong = {call for trace in e.traces for call, one in trace.events.items() if one.wrong_calls}
    return [call for call in e.forward_order if call in wrong]


def compared(e: Evidence) -> set[str]:
    """The calls whose outputs are compared on some rank, and do not hold another part."""
    calls = {call for trace in e.traces for call in trace.modules}
    return calls - {call for t in e.traces for call, one in t.events.items() if one.is_other}


def _not_compared(modules: Collection[str]) -> str:
    names = [name or "the model" for name in sorted(modules)]
    return f"not compared: {listed(names, 3)}"


def _never_run(e: Evidence, before: Sequence[str]) -> list[str]:
    """The modules before the first wrong output that no rank runs, each without its children."""
    ran = {module_of(call) for trace in e.traces for call in trace.modules}
    idle = {name for trace in e.traces for name in trace.idle} - ran
    idle &= set(map(module_of, e.forward_order))
    agrees = compared(e) - set(wrong_outputs(e))
    return [
        name
        for name in dict.fromkeys(map(module_of, before))
        if name in idle and not idle & set(around(name)) and not agrees & set(around(name))
    ]


def _moved_in_order(e: Evidence, first: str, outputs: Collection[int]) -> Iterator[str]:
    """Whether a rank runs the first wrong module before or after another than one process does."""
    if not isinstance(e, JobEvidence):
        return
    module, wrong = module_of(first), set(wrong_outputs(e))
    for trace in e.traces:
        if trace.rank not in outputs:
            continue
        place = {event: index for index, event in enumerate(trace.events)}
        later = e.events[e.events.index(first) + 1 :]
        earlier = [
            call
            for call in later
            if call in wrong and call in place and place[call] < place[first]
            if module not in (module_of(call), *around(module_of(call)))
            if module_of(call) not in around(module)
        ]
        if earlier:
            outer = [c for c in earlier if not set(earlier) & set(around(module_of(c)))]
            yield (
                f"{e.where([trace.rank])}, {listed(outer, 3)} "
                f"{'run' if len(outer) > 1 else 'runs'} before it, but after it on one process: "
                "correct the order of the modules"
            )
            return


def _run_twice(e: Evidence, first: str) -> Iterator[str]:
    """Whether ranks on both sides of a tensor run a module that comes later, and only once."""
    sources = _sources(e, first)
    before = [t for t in e.traces if first not in t.events and any(s in t.events for s in sources)]
    after = [t for t in e.traces if first in t.events and not any(s in t.events for s in sources)]
    later = e.events[e.events.index(first) :]
    placed = {holder_of(name) for run in e.runs for name in run.placements}
    twice = dict.fromkeys(
        module_of(call)
        for call in later
        if module_of(call) in placed
        if any(call in t.events for t in before) and any(call in t.events for t in after)
    )
    if twice and not isinstance(e, JobEvidence):
        who = e.where([t.rank for t in before])
        yield (
            f"{listed(twice)}, which one process runs once, and later, "
            f"{'run' if len(twice) > 1 else 'runs'} before it, too, {who}: leave it to the ranks "
            "that have what it reads on one process"
        )


def sums_of_output(e: Evidence, outputs: Mapping[int, ModuleOutput]) -> Iterator[str]:
    """What is wrong with the output if it is right but for its bias, or summed over an axis."""
    traces = [trace for trace in e.traces if trace.rank in outputs]
    own = {None if (n := one.biases) is None else round(n, 6) for one in outputs.values()}
    extra = {one.extra and (one.extra[0], round(one.extra[1], 6)) for one in outputs.values()}
    _, left = pooled([output.agreement for output in outputs.values()])
    if left >= EXPLAINED and len(extra) == 1 and (more := extra.pop()) is not None:
        source, factor = more
        often = "once" if abs(factor) == 1 else f"{abs(factor):g} times"
        often += " too often" if factor > 0 else " too seldom"
        yield f"it contains {describe_event(source)} {often}, and is correct otherwise"
        return
    if own != {None} and len(own) == 1:
        yield _biases(e, own.pop() or 0.0, "the output contains")
        return
    for axis in dict.fromkeys(axis for trace in traces for axis in trace.summed_output):
        sums = [trace.summed_output.get(axis) for trace in traces]
        if not all(one is not None and one.difference < EXPLAINED for one in sums):
            continue
        found = {trace.summed_biases.get(axis) for trace in traces}
        number = found.pop() if len(found) == 1 else None
        if number is not None and number > 1 + EXPLAINED:
            yield _biases(
                e,
                number,
                f"each rank's output is its share of a sum over {axis}, and the sum contains",
            )
        else:
            yield (
                f"summed over {axis}, the output is correct: it is a Partial that has not been "
                f"reduced. Give the module an output layout that reduces it over {axis} "
                "(Replicate() or Shard(...))"
            )


def _biases(e: Evidence, number: float, what: str) -> str:
    words = "no bias" if is_near(number + 1, 1.0) else f"the bias {number:g} times"
    form = " ({}): each rank adds the whole bias before the sum. Add it once, after the sum"
    because = e.equals(number, form=form) if number > 1 + EXPLAINED else ""
    return f"{what} {words}, and is correct otherwise{because}"


def explain_missing(e: Evidence) -> Iterator[str]:
    """Where the backward pass ends before it reaches all that the loss depends on."""
    if not e.failed("gradient"):
        return
    cut = [event for event in e.events if _any(e, event, lambda one: one.is_cut_off)]
    lost = [event for event in e.events if _any(e, event, lambda one: one.has_no_gradient)]
    if not cut and not lost:
        return
    event = cut[0] if cut else lost[-1]
    ranks = e.ranks_with(lambda t: event in t.events and t.events[event].has_no_gradient)
    where = e.where(ranks, e.ranks_with(lambda t: event in t.events))
    if cut and _any(e, event, lambda one: one.is_checkpointed):
        yield (
            f"the backward pass is cut off: {describe_event(event)} is in a reentrant checkpoint, "
            f"{where}, none of whose inputs requires a gradient, so nothing in it gets one. Use "
            "use_reentrant=False, or let what the checkpoint is given require a gradient"
            + (f". The code there{code}" if (code := e.lines_before(event, ranks)) else "")
        )
        return
    if cut:
        sources = listed([describe_event(source) for source in e.flow.get(event, ())], 3)
        what = f"{describe_event(event)}{f', which is computed from {sources},' * bool(sources)} "
        what += f"requires no gradient, {where}, but does on one process"
        wrong = [t.events[event] for t in e.traces if t.rank in ranks and event in t.events]
        if wrong and all(one.wrong_calls and not one.agreement.aa for one in wrong):
            what += ", and is zero: that of one process does not arrive"
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


def _any(e: Evidence, event: str, has: Callable[[ModuleOutput], bool]) -> bool:
    return any(event in trace.events and has(trace.events[event]) for trace in e.traces)


def _first_backward(e: Evidence) -> tuple[str, list[str], dict[str, str]] | None:
    """The first tensor in backward order with a wrong gradient, all of these, and the axis over
    which those are Partial that are.
    """
    if not e.failed("gradient"):
        return None
    known = [event for event in e.events if _any(e, event, lambda o: o.gradient is not None)]
    wrong = [one for one in known if any(_has_wrong_gradient(e, t, one) for t in e.traces)]
    # Partial gradients may be intended, until one is neither right nor a Partial. Where the loss
    # cuts the graph, one is if gradients of what comes before it in the forward pass agree.
    partial = {event: axis for event in wrong if (axis := _partial_over(e, event))}
    cut = {event for event in partial if not e.flow.get(event) and known[0] != wrong[0]}
    wrong = [event for event in wrong if event not in cut]
    partial = {event: axis for event, axis in partial.items() if event not in cut}
    if not wrong:
        return None
    rest = [event for event in wrong if event not in partial]
    # One factor of all gradients comes from how they are reduced.
    if not rest and _is_one_factor(e):
        return None
    last = (rest or wrong)[-1 if rest else 0]
    if not rest and not e.following.get(wrong[-1]):
        last = wrong[-1]
    return last, wrong, partial


def unexplained_backward(e: Evidence) -> tuple[str, list[str]] | None:
    """The first tensor in backward order with a wrong gradient, and what is computed from it, if
    neither is Partial and the two are no multiples of each other.
    """
    if (first := _first_backward(e)) is None:
        return None
    last, _, partial = first
    own = [t.events[last].gradient for t in e.traces if _has_wrong_gradient(e, t, last)]
    _, left = pooled([one for one in own if one is not None])
    if partial.keys() & {last, *e.following.get(last, ())} or left < EXPLAINED:
        return None
    return last, _next_compared(e, last)


def explain_backward(e: Evidence) -> Iterator[str]:
    """The first tensor in backward order whose gradient differs."""
    if (found_first := _first_backward(e)) is None:
        return
    last, wrong, partial = found_first
    found = {
        trace.rank: own
        for trace in e.traces
        if _has_wrong_gradient(e, trace, last) and (own := trace.events[last].gradient)
    }
    where = e.where(found, e.ranks_with(lambda t: last in t.events))
    following = e.following.get(last, ())
    from_partial = [other for other in following if other in partial]
    after = _next_compared(e, last)
    shown = listed([describe_event(reader) for reader in from_partial or after], 3)
    unseen = ""
    start = f"in the backward pass, the gradient of {describe_event(last)} is the first that "
    start += f"differs, {where}"
    if not following:
        place = "The loss reads it, so the backward pass of the loss itself is wrong"
        if last in partial:
            place += f": its sum over {partial[last]} is correct, so it is still Partial. "
            place += f"All-reduce it over {partial[last]} in that backward pass"
        unseen, is_named = _unseen(e, ""), last in partial or e.returned or e.passed_on
        place += unseen or ("" if is_named else _sent_by_loss(e, last))
    elif from_partial:
        axis = partial[from_partial[0]]
        place = (
            f"The gradient of {shown} is correct after a sum over {axis}: it is still Partial over "
            f"{axis}. All-reduce it over {axis} between the two, in the backward pass"
        )
        first = next(event for event in reversed(wrong) if partial.get(event) == axis)
        # What a module receives goes on inside it.
        if any(not is_input(event) for event in wrong if partial.get(event) == axis):
            order = e.parameter_order
            weight = max(e.failed("gradient"), key=lambda name: order.get(name, -1))
            place += f", or earlier: they are Partial from the gradient of {describe_event(first)} "
            place += f"on, and {weight} is the first parameter whose gradient is wrong"
    elif last in partial:
        before = listed([describe_event(source) for source in e.flow.get(last, ())], 3)
        place = f"It is correct after a sum over {partial[last]}: it is still Partial over "
        place += f"{partial[last]}. All-reduce it over {partial[last]} there"
        place += f", or on the way back to {before}" if before else ""
    elif after and is_input(last):
        place = f"{module_of(last) or 'The model'} returns it, from a gradient of {shown} that "
        place += "agrees"
        if isinstance(e, JobEvidence) and e.dims.degrees.get("tp", 1) > 1:
            place += ". If it gathers its input over tp, each rank has only its share of that "
            place += "gradient: sum it over tp"
        elif _exchanges_forward_alone(e, last):
            place += ". It exchanges something between ranks in its forward pass, but nothing in "
            place += f"its backward pass: {UNSEEN}"
    elif after:
        place = f"The error is between it and {shown}, whose gradient agrees"
    else:
        place = "The code that reads it returns a wrong gradient"
    how = _of_gradient(e, last, found, is_partial=bool(partial))
    how += _summed_again(e, after, found) if after and not partial else ""
    written = _written(e, last)
    how = written or how or _unused(e, last)
    returned = "" if unseen else e.returned
    lines = "" if returned else e.lines_before(last, list(found), is_backward=True)
    passed_on = "" if partial or how or unseen else e.passed_on
    code = returned or (f"The code there{lines}" if lines else passed_on)
    code = "" if written else code
    yield joined(start, place, how, code)


def _has_wrong_gradient(e: Evidence, trace: RankTrace, event: str) -> bool:
    one = trace.events.get(event)
    return bool(one and one.gradient and one.gradient.error) and not _has_others(e, trace, event)


def _has_others(e: Evidence, trace: RankTrace, event: str) -> bool:
    """Whether a tensor and all that is computed from it here are other rows than on one process."""
    is_other = event in trace.events and trace.events[event].is_other
    return is_other and all(
        _has_others(e, trace, reader) if reader in trace.events else _any(e, reader, bool)
        for reader in e.following.get(event, ())
    )


def _of_gradient(
    e: Evidence, last: str, found: Mapping[int, Agreement], *, is_partial: bool
) -> str:
    """What the numbers of the first wrong gradient show; "" for nothing."""
    how = ""
    factor, left = pooled(list(found.values()))
    if left < EXPLAINED and not is_near(factor, 1.0):
        how = f"It is {factor:.6g} times as large as on one process" if factor else "It is zero"
        how += e.equals(factor)
    own_traces = [t for t in e.traces if t.rank in found]
    if added := next(filter(None, (t.events[last].gradient_adds for t in own_traces)), None):
        how = f"Microbatch {added[0]} has the gradient of microbatch {added[1]} in it, too: they "
        how += "add up where both use one tensor. Clear its .grad, or give each one of its own"
    elif all(t.events[last].gradient_is_moved for t in e.traces if t.rank in found):
        how = "It has the gradients of other rows of one process: those of another rank or "
        how += "microbatch, or its own in another order"
    places = {t.rank: t.events[last].gradient_places for t in e.traces if t.rank in found}
    scales = [t.events[last].gradient_scales for t in own_traces]
    if not how and all(scales):
        where = f"{e.where([own_traces[0].rank])}, " * (len({*scales}) > 1)
        how = f"{where}it is {scales[0]} as large as on one process: its parts are weighted by "
        how += "numbers of their own, as where means over parts are averaged, and not all elements"
    how = how or next(_where(e, places), "")
    own = [event for event in e.events if module_of(event) == module_of(last)]
    over = [event for event in own if _any(e, event, lambda one: one.is_overwritten)]
    # A function may reduce in place what it is given.
    if over and not is_partial:
        how = f"{describe_event(over[0])} was overwritten after the forward pass, and the backward "
        how += "pass reads it: a buffer is used again too early"
    return how[:1].upper() + how[1:]


def _summed_again(e: Evidence, after: Sequence[str], found: Mapping[int, Agreement]) -> str:
    """Whether a module sums over ranks, and its gradient is the sum once more; "" if not."""
    factor, left = pooled(list(found.values()))
    groups = {
        group
        for trace in e.watched
        for call, of_call in trace.groups.items()
        for group in of_call
        if any(module_of(call) == module_of(event) for event in after) and len(group) > 1
    }
    if left > EXPLAINED or not any(is_near(factor, len(group)) for group in groups):
        return ""
    return (
        f". {listed([module_of(event) for event in after], 3)} exchanges something between these "
        f"{factor:.0f} ranks: its backward pass sums the gradient once more, which each rank has "
        "whole. Pass it on as it is there (torch.distributed.nn's all_reduce sums it again)"
    )


def _written(e: Evidence, event: str) -> str:
    """The line that writes into a tensor behind autograd, where a gradient is wrong; or ""."""
    calls = [event.partition(" <- ")[0], *reversed(around(module_of(event)))]
    found = (t.written[call] for t in e.watched for call in (*calls, "") if call in t.written)
    return next(
        (
            f"{line} writes into the result of {source}, where autograd does not see it (by .data, "
            "or detach()): the backward pass gives what is overwritten a gradient, too. Use an "
            "operator that autograd sees, such as masked_fill or where"
            for line, source in found
        ),
        "",
    )


def _unused(e: Evidence, event: str) -> str:
    """What the backward pass receives just before a gradient, but computes nothing with; or ""."""
    for trace in e.watched:
        for line, parts in trace.unused.items():
            if line in trace.lines_backward.get(event, ()):
                which = f"part{'s' * (len(parts) > 1)} {listed(parts)}"
                return (
                    f"Of what {line} receives on the way, nothing is computed with {which} "
                    "(counted from 0), but only with the others. Look whether the code there goes "
                    "on with this rank's own, saved tensors instead"
                )
    return ""


def _exchanges_forward_alone(e: Evidence, event: str) -> bool:
    """Whether a module calls collectives, but its backward pass to its input does not."""
    module = module_of(event)
    calls = {module_of(call) for trace in e.watched for call in trace.groups}
    inside = any(module in (call, *around(call)) for call in calls)
    return inside and not any(event in trace.exchanged for trace in e.watched)


def _is_one_factor(e: Evidence) -> bool:
    """Whether all gradients, several, are wrong by one factor, on every rank."""
    steps, wrong = [run.steps[e.step] for run in e.runs], set(e.failed("gradient"))
    parts = [one for step in steps for one in step.gradients.values()]
    is_all = wrong == {name for step in steps for name in step.gradients}
    return is_all and len(wrong) > 1 and pooled(parts)[1] < EXPLAINED


def _unseen(e: Evidence, call: str) -> str:
    """The line of a call that sends what has a gradient and gets back what has none; or ""."""
    line = next((t.unseen[call] for t in e.watched if call in t.unseen), "")
    return f". In the forward pass, {line} sends what has a gradient: {UNSEEN}" * bool(line)


def _sent_by_loss(e: Evidence, event: str) -> str:
    """The line of the loss that exchanges something, if nothing is on the way back to an event."""
    lines = [t.sent_by_loss for t in e.watched if t.sent_by_loss and event not in t.exchanged]
    return (
        f": {lines[0]} brings what other ranks have, but on the way back nothing is exchanged. Add "
        "up the gradient of what a rank sends over all that read it"
        if lines
        else ""
    )


def _partial_over(e: Evidence, event: str) -> str:
    """The axis over which the sum of a wrong gradient is right; "" for none."""
    sums = [t.summed_backward[event] for t in e.traces if event in t.summed_backward]
    for axis in e.dims.degrees:
        own = [of_rank[axis] for of_rank in sums if axis in of_rank]
        if own and all(one.difference < EXPLAINED for one in own):
            return axis
    return ""


def _next_compared(e: Evidence, event: str) -> list[str]:
    """The tensors with a gradient that are computed next from an event, in forward order."""
    known = {name for t in e.traces for name, one in t.events.items() if one.gradient is not None}
    following = e.following
    stack, seen = [event], set[str]()
    while stack:
        for other in following.get(stack.pop(), ()):
            if other not in seen:
                seen.add(other)
                stack += [] if other in known else [other]
    return [other for other in e.events if other in seen & known]
