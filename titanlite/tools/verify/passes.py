"""Differences in forward and backward pass: outputs, recomputation, loss; torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from titanlite.parallelize.float8.spec import Float8Section
from titanlite.tools.verify.evidence import (
    EXPLAINED,
    WRONG,
    Evidence,
    JobEvidence,
    pooled,
    ranks_of,
    worst,
)
from titanlite.tools.verify.gradients import explain_gradients
from titanlite.tools.verify.record import ModuleOutput, module_of
from titanlite.tools.verify.wording import agree, is_near, listed, name_parameters, name_ranks


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
        largest = max((value for _, value in seen.values()), default=amax)
        wrong = [rank for rank, (_, value) in seen.items() if not is_near(value, amax)]
        if wrong and is_near(largest, amax):
            yield (
                f"{name} is the first float8 layer whose scales differ, "
                f"{name_ranks(wrong, e.runs, seen)}: the amax there is that of the rank's own part "
                "of the tensor, but the largest amax of all ranks equals that of one process. "
                "Reduce the amax (MAX) over every axis that splits the tensor: tokens over data "
                "and context parallelism, features over tp"
            )
        if wrong:
            return


def explain_forward(e: Evidence) -> Iterator[str]:
    wrong: dict[str, dict[int, ModuleOutput]] = defaultdict(dict)
    holders: dict[str, list[int]] = defaultdict(list)
    for trace in e.traces:
        for name, output in trace.modules.items():
            holders[name].append(trace.rank)
            if output.wrong_calls:
                wrong[name][trace.rank] = output
    first = next((name for name in e.forward_order if name in wrong), None)
    if first is None:
        return
    outputs = wrong[first]
    name = first or "the model's logits"
    parts = [
        f"{name} is the first module in forward order whose output differs, "
        f"{name_ranks(outputs, e.runs, holders[first])}; every module before it agrees"
    ]
    if e.reference_trace is not None and e.reference_trace.num_left_out:
        parts[0] += f" ({e.reference_trace.num_left_out} outputs were too large to compare)"
    one = next(iter(outputs.values()))
    if not all(math.isfinite(output.agreement.aa) for output in outputs.values()):
        parts.append("the output is not finite")
    if len(one.wrong_calls) < one.num_calls:
        calls = listed(one.wrong_calls)
        which = "microbatch" if len(one.wrong_calls) == 1 else "microbatches"
        parts.append(f"only {which} {calls} of {one.num_calls} differ (counted from 0)")
    sums = [trace.summed_output for trace in e.traces if trace.rank in outputs]
    for axis in {axis for of_rank in sums for axis in of_rank}:
        if all(axis in s and s[axis].difference < EXPLAINED for s in sums):
            parts.append(
                f"summed over {axis}, the output is correct: it is a Partial that has not been "
                f"reduced. Give the module an output layout that reduces it over {axis} "
                "(Replicate() or Shard(...))"
            )
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
        parts.append(f"it is {factor:.6g} times as large as on one process{what}")
    module = module_of(first)
    style = next((t.styles[module] for t in e.traces if module in t.styles), "")
    if style:
        parts.append(f"its entry in the tensor-parallel plan is {style}")
    elif e.dims.degrees.get("cp", 1) > 1 and len(outputs) < len(holders[first]):
        parts.append(
            "other cp ranks agree, so this rank misses some of their keys and values, or uses some "
            "twice"
        )
    elif e.dims.degrees.get("cp", 1) > 1 and "att" in module.lower():
        parts.append(
            "in a layout such as headtail a rank's positions jump: if a mask is made from "
            "positions, it must not treat a jump as the start of a document"
        )
    yield ". ".join(part[:1].upper() + part[1:] if i else part for i, part in enumerate(parts))


def explain_loss(e: Evidence) -> Iterator[str]:
    if not e.failed("loss"):
        return
    own, known = e.runs[0].steps[e.step].loss, e.reference[e.step].loss
    values = {run.steps[e.step].loss for run in e.runs}
    if strange := [value for value in values if not math.isfinite(value)]:
        yield f"the loss is {strange[0]}, but finite on one process"
        return
    if len(values) > 1 and e.is_split:
        yield (
            f"ranks report {len(values)} different losses: a sum over ranks is missing. All-reduce "
            "the loss"
        )
    elif len(values) > 1 and not outputs_differ(e):
        yield "ranks with the same batch have different losses: look at the loss function"
    gradients_agree = not e.failed("gradient")
    if is_near(own, known):
        return
    ratio = own / known if known else float("nan")
    same = e.factor(ratio)
    if same:
        shown = ". Gradients agree, so only the reported loss is wrong" if gradients_agree else ""
        way = "divided" if ratio < 1 else "summed"
        yield (
            f"the loss is {ratio:.6g} times as large as on one process, and {ratio:.6g} is {same}: "
            f"it is {way} once too often{shown}"
        )
    elif gradients_agree:
        yield (
            f"the loss is {ratio:.6g} times as large as on one process, but all gradients agree: "
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
    return any(
        output.wrong_calls
        for trace in e.traces
        for name, output in trace.modules.items()
        if module in (None, name)
    )


def wrong_backward(e: Evidence) -> str:
    """The module whose backward pass is wrong, if the gradients of the outputs show it; or ""."""
    if not outputs_agree(e) or e.failed("loss"):
        return ""
    worst: dict[str, float] = defaultdict(float)
    for trace in e.traces:
        for name, output in trace.modules.items():
            if output.gradient is not None:
                worst[name] = max(worst[name], output.gradient.difference)
    order = [name for name in e.forward_order if name in worst]
    wrong = [index for index, name in enumerate(order) if worst[name] > WRONG]
    # An error in the backward pass makes most gradients of earlier modules wrong too.
    if not wrong or wrong[-1] == len(order) - 1 or 2 * len(wrong) <= wrong[-1]:
        return ""
    last, after = order[wrong[-1]], order[wrong[-1] + 1]
    layers = () if e.reference_trace is None else tuple(e.reference_trace.experts)
    layer = next((one for one in layers if after.startswith(f"{one}.")), "")
    if layer and not last.startswith(f"{layer}."):
        return (
            f"in the backward pass, the gradient of the output of {last} is the first that "
            f"differs. {layer} reads it, and the outputs inside that layer have correct gradients, "
            "so its router, its routed or its shared experts return a wrong gradient of their "
            "input. If they gather their input over tp, each rank has only its share of that "
            "gradient: sum it over tp"
        )
    return (
        f"in the backward pass, the gradient of the output of {last} is the first that differs. "
        f"The next module in forward order is {after or 'the model'}. The gradient of its output "
        "agrees, so it computes a wrong gradient of its input"
    )


def unexplained(e: Evidence) -> str:
    wrong = set(e.failed("gradient"))
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
            f"unexplained: {measured}, but {shown} {agree(shown, 'differ')}, "
            f"{name_ranks(ranks, e.runs, range(len(e.runs)))}; {last} is the first in backward "
            "order. Neither a factor, nor a missing sum over an axis, nor a missing part of the "
            f"batch explains it. Look at {where}"
        )
    return "unexplained: no known pattern fits; the table shows what differs"
