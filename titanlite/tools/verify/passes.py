"""Differences in forward and backward pass: outputs, recomputation, loss; torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from titanlite.parallelize.float8.spec import Float8Section
from titanlite.tools.verify.evidence import (
    EXPLAINED,
    WRONG,
    Evidence,
    JobEvidence,
    by_rank,
    holder_of,
    pooled,
    ranks_of,
    worst,
)
from titanlite.tools.verify.gradients import explain_gradients
from titanlite.tools.verify.record import ModuleOutput, around, module_of, wrong_calls_in_order
from titanlite.tools.verify.wording import (
    agree,
    is_near,
    listed,
    name_parameters,
    name_ranks,
    times,
)


def explain_cures(e: Evidence) -> Iterator[str]:
    if not e.cured_by:
        return
    details = [*_pending_inputs(e), *_recomputed(e)] or list(explain_gradients(e))[:1]
    because = f": {'; '.join(details)}" if details else ""
    yield f"the plan agrees with one process if {' or if '.join(e.cured_by)}{because}"


def _pending_inputs(e: Evidence) -> list[str]:
    names = list(dict.fromkeys(name for trace in e.traces for name in trace.pending_inputs))
    if not names:
        return []
    return [
        f"the compiled module {names[0]} receives the result of a collective that is still "
        "running (an AsyncCollectiveTensor), and the compiler differentiates it wrongly. Wait for "
        "the collective before the compiled module"
    ]


def _recomputed(e: Evidence) -> list[str]:
    largest: dict[str, float] = defaultdict(float)
    for trace in e.traces:
        for name, output in trace.modules.items():
            largest[name] = max(largest[name], output.recomputed)
    wrong = [name for name in e.forward_order if largest.get(name, 0.0) > WRONG]
    if not wrong:
        return []
    return [
        f"activation checkpointing recomputes values that differ from the forward pass, first in "
        f"{wrong[0]} (by {largest[wrong[0]]:.1e}). Recomputation must have the inputs of "
        "the forward pass and save the same tensors, for instance with an operator counter for "
        "each pass"
    ]


def explain_recomputation(e: Evidence) -> Iterator[str]:
    if not e.cured_by:
        yield from _recomputed(e)


def explain_float8(e: JobEvidence) -> Iterator[str]:
    """The first float8 layer whose input scales differ from those on one process."""
    known = {} if e.reference_trace is None else e.reference_trace.scaled
    for name in filter(known.__contains__, e.forward_order):
        is_rowwise, amax = known[name]
        seen = {t.rank: t.scaled[name] for t in e.traces if name in t.scaled}
        if others := [rank for rank, (rowwise, _) in seen.items() if rowwise != is_rowwise]:
            ways = ("one scale per row", "one scale")
            own, right = ways if not is_rowwise else ways[::-1]
            yield (
                f"{name} scales its input with {own}, but its recipe "
                f"{e.job.config.section(Float8Section).recipe} needs {right}, "
                f"{name_ranks(others, e.runs, seen)}: the module that computes this layer's "
                "product uses another recipe. Call the layer's own product(x, weight) there"
            )
            return
        for what in ("input", "weight"):
            if is_rowwise and what == "weight":
                continue
            yield from (words := list(_wrong_scale(e, name, what, is_rowwise, amax, seen)))
            if words:
                return
    for name in reversed(list(filter(known.__contains__, e.forward_order))):
        seen = {t.rank: t.scaled[name] for t in e.traces if name in t.scaled}
        yield from (words := list(_wrong_scale(e, name, "gradient", False, known[name][1], seen)))
        if words:
            return


def _wrong_scale(
    e: JobEvidence,
    name: str,
    what: str,
    is_rowwise: bool,
    known: Mapping[str, float],
    seen: Mapping[int, tuple[bool, Mapping[str, float]]],
) -> Iterator[str]:
    """The ranks whose amax is not that of all ranks; `what` is that of one process."""
    values = {rank: amax[what] for rank, (_, amax) in seen.items() if what in amax}
    if what not in known or not values:
        return
    right = dict.fromkeys(values, known[what])
    if is_rowwise:
        # Ranks with other tokens have other rows.
        tokens = {
            r: tuple(n for a, n in e.runs[r].coordinates.items() if a != "tp") for r in values
        }
        right = {r: max(v for o, v in values.items() if tokens[o] == tokens[r]) for r in values}
    wrong = [rank for rank, value in values.items() if not is_near(value, right[rank])]
    if not wrong or not is_near(max(values.values()), known[what]):
        return
    which = "" if what == "input" else f" of its {what}" if what == "weight" else " of its gradient"
    yield (
        f"{name} is the {'last' if what == 'gradient' else 'first'} float8 layer whose "
        f"scales{which} differ, {name_ranks(wrong, e.runs, seen)}: the amax there is that of the "
        "rank's own part of the tensor, but the largest amax of all ranks equals that of one "
        "process. "
        "Reduce the amax (MAX) over every axis that splits the tensor: "
        + (
            "tp, which shards the weight"
            if what == "weight"
            else "tokens over data and context parallelism, features over tp"
        )
    )


def explain_forward(e: Evidence) -> Iterator[str]:
    if not e.evaluates:
        yield from first_difference(e)


def first_difference(e: Evidence) -> Iterator[str]:
    """What is wrong with the first module in forward order whose output differs."""
    order = list(e.forward_order)
    first = next(iter(wrong_outputs(e)), None)
    if first is None:
        return
    holders = [trace.rank for trace in e.traces if first in trace.modules]
    outputs = {
        trace.rank: output
        for trace in e.traces
        if (output := trace.modules.get(first)) is not None and output.wrong_calls
    }
    before = order[: order.index(first)]
    name, module = first or "the model's logits", module_of(first)
    idle = _never_run(e, before)
    unlike = {module_of(call) for call in before if call not in compared(e)} - set(idle)
    shown = f" that was compared agrees ({_not_compared(unlike)})" if unlike else " agrees"
    parts = [
        f"{name} is the first module in forward order whose output differs, "
        f"{name_ranks(outputs, e.runs, holders)}; every module before it{shown}"
    ]
    if idle:
        parts[0] = f"{listed(idle, 3)} never {agree('the' if len(idle) == 1 else '', 'run')}, and "
        parts[0] += f"{name}, which comes later, is the first module whose output differs, "
        parts[0] += name_ranks(outputs, e.runs, holders)
    if e.reference_trace is not None and e.reference_trace.num_left_out:
        parts[0] += f" ({e.reference_trace.num_left_out} outputs were too large to compare)"
    one = next(iter(outputs.values()))
    if not all(math.isfinite(output.agreement.aa) for output in outputs.values()):
        parts.append("the output is not finite")
    if len(one.wrong_calls) < one.num_calls:
        calls = listed(one.wrong_calls)
        which = "microbatch" if len(one.wrong_calls) == 1 else "microbatches"
        parts.append(f"only {which} {calls} of {one.num_calls} differ (counted from 0)")
    parts += _moved_in_order(e, first, outputs)
    parts += sums_of_output(e, outputs)
    if shape := next((output.shape for output in outputs.values() if output.shape), ""):
        parts.append(f"its local shape is {shape}: correct its output layout")
    if places := {output.elsewhere for output in outputs.values() if output.elsewhere}:
        parts.append(
            f"the output is correct for {listed(sorted(places))}: the module is given, or "
            "computes, the wrong positions or offset. Give it the positions of the rank's own "
            "tokens"
        )
    factor, left = pooled([output.agreement for output in outputs.values()])
    if left < EXPLAINED and not is_near(factor, 1.0):
        same = e.factor(factor)
        what = f" ({factor:.6g} is {same})" if same else ""
        parts.append(f"it is {times(factor)} as large as on one process{what}")
    style = next((t.styles[module] for t in e.traces if module in t.styles), "")
    has_weights = any(holder_of(name) == module for run in e.runs for name in run.placements)
    has_cp = e.dims.degrees.get("cp", 1) > 1 and "att" in module.lower() and not has_weights
    if style:
        parts.append(f"its entry in the tensor-parallel plan is {style}")
    elif has_cp and len(outputs) < len(holders):
        parts.append(
            "other cp ranks agree, so this rank misses some of their keys and values, or uses some "
            "twice"
        )
    elif has_cp and any(output.differs_from_jump for output in outputs.values()):
        parts.append(
            "it is correct up to where a rank's positions jump: the attention to other ranks' "
            "blocks is wrong, or a mask that is made from positions treats the jump as the start "
            "of a document"
        )
    yield ". ".join(part[:1].upper() + part[1:] if i else part for i, part in enumerate(parts))


def wrong_outputs(e: Evidence) -> list[str]:
    """The calls whose outputs differ, in forward order, without those that hold another part."""
    wrong = [
        {call: bool(one.wrong_calls) for call, one in trace.modules.items()} for trace in e.traces
    ]
    return wrong_calls_in_order(e.forward_order, wrong)


def compared(e: Evidence) -> set[str]:
    """The calls whose outputs are compared on some rank, and do not hold another part."""
    wrong = set(wrong_outputs(e))
    return {
        call
        for call in {call for trace in e.traces for call in trace.modules}
        if call in wrong
        or not any(t.modules[call].wrong_calls for t in e.traces if call in t.modules)
    }


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
    wrong = set(wrong_outputs(e))
    for trace in e.traces:
        if trace.rank not in outputs:
            continue
        place = {call: index for index, call in enumerate(trace.modules)}
        order = [call for call in e.forward_order if call in place and call in wrong]
        earlier = [
            call
            for call in order
            if place[call] < place[first]
            and call != first
            and module_of(first) not in around(module_of(call))
        ]
        if earlier:
            outer = [c for c in earlier if not set(earlier) & set(around(module_of(c)))]
            yield (
                f"{name_ranks([trace.rank], e.runs, range(len(e.runs)))}, {listed(outer, 3)} "
                f"{'run' if len(outer) > 1 else 'runs'} before it, but after it on one process: "
                "correct the order of the modules"
            )
            return


def sums_of_output(e: Evidence, outputs: Mapping[int, ModuleOutput]) -> Iterator[str]:
    """What is wrong with the output if it is right but for its bias, or summed over an axis."""
    traces = [trace for trace in e.traces if trace.rank in outputs]
    own = {None if (n := one.biases) is None else round(n, 6) for one in outputs.values()}
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
    same = e.factor(number) if number > 1 + EXPLAINED else ""
    words = "no bias" if is_near(number + 1, 1.0) else f"the bias {number:g} times"
    because = (
        f" ({number:g} is {same}): each rank adds the whole bias before the sum. Add it once, "
    )
    because += "after the sum"
    return f"{what} {words}, and is correct otherwise{because if same else ''}"


def explain_loss(e: Evidence) -> Iterator[str]:
    if not e.failed("loss"):
        return
    own, known = e.runs[0].steps[e.step].loss, e.reference[e.step].loss
    losses = {run.rank: run.steps[e.step].loss for run in e.runs}
    values = set(losses.values())
    if strange := [value for value in values if not math.isfinite(value)]:
        yield f"the loss is {strange[0]}, but finite on one process"
        return
    if len(values) > 1 and e.is_split:
        yield (
            f"ranks report different losses ({by_rank(e, lambda step: step.loss)}): a sum over "
            "ranks is missing. All-reduce the loss"
        )
    elif len(values) > 1 and not outputs_differ(e):
        yield (
            f"ranks with the same batch have different losses ({by_rank(e, lambda step: step.loss)}"
            "): look at the loss function"
        )
    gradients_agree = not e.failed("gradient")
    if is_near(own, known):
        return
    ratio = own / known if known else float("nan")
    same = e.factor(ratio)
    if same:
        shown = ". Gradients agree, so only the reported loss is wrong" if gradients_agree else ""
        way = "divided" if ratio < 1 else "summed"
        yield (
            f"the loss is {times(ratio)} as large as on one process, and {ratio:.6g} is {same}: "
            f"it is {way} once too often{shown}"
        )
    elif gradients_agree:
        yield (
            f"the loss is {times(ratio)} as large as on one process, but all gradients agree: "
            "only the reported loss is wrong"
        )
    elif outputs_agree(e):
        yield (
            f"every module output agrees, including the model's logits, but the loss is "
            f"{ratio:.6g} times as large as on one process: the loss function, its targets or its "
            "divisor is wrong"
        )


def outputs_agree(e: Evidence) -> bool:
    """Whether outputs were recorded and all of them agree."""
    return any(trace.modules for trace in e.traces) and not outputs_differ(e)


def outputs_differ(e: Evidence, module: str | None = None) -> bool:
    """Whether any recorded output, or that of this module, differs on any rank."""
    if module is None:
        return bool(wrong_outputs(e))
    return any(trace.modules[module].wrong_calls for trace in e.traces if module in trace.modules)


def wrong_backward(e: Evidence) -> str:
    """The module whose backward pass is wrong, if the gradients of the outputs show it; or ""."""
    if not outputs_agree(e) or e.failed("loss"):
        return ""
    can_compare, worst = compared(e), dict[str, float]()
    for trace in e.traces:
        for name, output in trace.modules.items():
            if output.gradient is not None and name in can_compare:
                worst[name] = max(worst.get(name, 0.0), output.gradient.difference)
    order = [name for name in e.forward_order if name in worst]
    wrong = [index for index, name in enumerate(order) if worst[name] > WRONG]
    # An error in the backward pass makes most gradients of earlier modules wrong too.
    if not wrong or wrong[-1] == len(order) - 1 or 2 * len(wrong) <= wrong[-1]:
        return ""
    last, after = order[wrong[-1]], order[wrong[-1] + 1]
    layers = () if e.reference_trace is None else tuple(e.reference_trace.experts)
    layer = next((one for one in layers if after.startswith(f"{one}.")), "")
    start = f"in the backward pass, the gradient of the output of {last} is the first that differs"
    if layer and not last.startswith(f"{layer}."):
        return (
            f"{start}. {layer} reads it, and the outputs inside that layer have correct gradients, "
            "so its router, its routed or its shared experts return a wrong gradient of their input"
            + (
                ". If they gather their input over tp, each rank has only its share of that "
                "gradient: sum it over tp"
                if e.dims.degrees.get("tp", 1) > 1
                else ""
            )
        )
    readers = () if e.reference_trace is None else e.reference_trace.readers.get(last, ())
    right = [name for name in readers if worst.get(name, math.inf) <= WRONG]
    inner = [name for name in right if not any(name in around(other) for other in right)]
    if not inner:
        return f"{start}, and that of {after or 'the model'}, which is compared next, agrees: look "
        "between these outputs"
    if len(inner) > 1:
        return (
            f"{start}. {listed(inner, 4)} read it, and the gradients of their outputs agree, so "
            "one of them, or the code between, computes a wrong gradient of its input"
        )
    return (
        f"{start}. {inner[0]} reads it, and the gradient of its output agrees, so it, or the code "
        "between, computes a wrong gradient of its input"
    )


def unexplained(e: Evidence, names: Collection[str] | None = None) -> str:
    """What is known of wrong gradients, all or these, that no question explains."""
    wrong = set(e.failed("gradient") if names is None else names)
    if wrong:
        order = e.parameter_order
        last = max(sorted(wrong), key=lambda name: order.get(name, -1))
        ranks = ranks_of(e, lambda run: worst(run, "gradients", e.step, sorted(wrong)))
        shown = name_parameters(wrong, e.runs, "gradient")
        if place := wrong_backward(e):
            return f"every module output agrees, but {shown} {agree(shown, 'differ')}: {place}"
        seen = "every recorded module output agrees" if outputs_agree(e) else ""
        loss = "the loss differs" if e.failed("loss") else "the loss agrees"
        measured = f"{seen}, {loss}" if seen else loss
        where = (
            "the backward pass, and at what is done to gradients after it"
            if seen and not e.failed("loss")
            else "the loss, and at what was not compared"
        )
        return (
            f"unexplained: {measured}, {'and' if e.failed('loss') else 'but'} {shown} "
            f"{agree(shown, 'differ')}, "
            f"{name_ranks(ranks, e.runs, range(len(e.runs)))}; {last} is the first in backward "
            "order. Neither a factor, nor a missing sum over an axis, nor a missing part of the "
            f"batch explains it. Look at {where}"
        )
    return "unexplained: no known pattern fits; the table shows what differs"
