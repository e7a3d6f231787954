"""What the forward and the backward pass compute: outputs, recomputation, loss; torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from titanlite.verify.evidence import EXPLAINED, Evidence, pooled, ranks_of, worst
from titanlite.verify.gradients import explain_gradients
from titanlite.verify.record import ModuleOutput, module_of
from titanlite.verify.words import agree, is_near, listed, name_parameters, name_ranks

# How far the gradient of an output may be from the reference's, in float64.
WRONG_GRADIENT = 1e-9


def explain_cures(e: Evidence) -> Iterator[str]:
    if not e.cured_by:
        return
    details = [*_pending_inputs(e), *_recomputed(e)] or list(explain_gradients(e))[:1]
    because = f": {'; '.join(details)}" if details else ""
    yield f"with {' and also with '.join(e.cured_by)} the plan agrees{because}"


def _pending_inputs(e: Evidence) -> list[str]:
    names = list(dict.fromkeys(name for trace in e.traces for name in trace.pending_inputs))
    if not names:
        return []
    return [
        f"the compiled module {names[0]} is given the result of a collective that is still "
        "running (an AsyncCollectiveTensor), which the compiler differentiates wrongly; wait for "
        "it before the compiled module"
    ]


def _recomputed(e: Evidence) -> list[str]:
    largest: dict[str, float] = defaultdict(float)
    for trace in e.traces:
        for name, output in trace.modules.items():
            largest[name] = max(largest[name], output.recomputed)
    wrong = [name for name in e.forward_order if largest.get(name, 0.0) > 1e-9]
    if not wrong:
        return []
    return [
        f"activation checkpointing recomputes other values than the forward pass had, first in "
        f"{wrong[0]} (by {largest[wrong[0]]:.1e}): what it saves and what it computes again must "
        "be chosen alike both times, for instance by counts of their own for the forward pass and "
        "the recomputation"
    ]


def explain_recomputation(e: Evidence) -> Iterator[str]:
    if not e.cured_by:
        yield from _recomputed(e)


def explain_float8(e: Evidence) -> Iterator[str]:
    """The first float8 layer that scales its input otherwise than one process does."""
    known = {} if e.reference_trace is None else e.reference_trace.scaled
    for name in filter(known.__contains__, e.forward_order):
        is_rowwise, amax = known[name]
        seen = {t.rank: t.scaled[name] for t in e.traces if name in t.scaled}
        if others := [rank for rank, (rowwise, _) in seen.items() if rowwise != is_rowwise]:
            ways = ("a scale a row", "one scale")
            own, right = ways if not is_rowwise else ways[::-1]
            yield (
                f"{name} scales its input by {own}, and its recipe "
                f"{e.job.config.quantize.linear.float8.recipe} has {right}, "
                f"{name_ranks(others, e.runs, seen)}: what multiplies in its place has another "
                "recipe; let it call the layer's own product"
            )
            return
        largest = max((value for _, value in seen.values()), default=amax)
        wrong = [rank for rank, (_, value) in seen.items() if not is_near(value, amax)]
        if wrong and is_near(largest, amax):
            yield (
                f"{name} is the first float8 layer whose scales differ, "
                f"{name_ranks(wrong, e.runs, seen)}: its amax there is that of the rank's own part "
                "alone, and the largest of all ranks is right. Reduce an amax (MAX) over every "
                "axis that cuts what it is of: tokens over data and context parallelism, features "
                "over tp"
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
        f"{name_ranks(outputs, e.runs, holders[first])}; all before it agree"
    ]
    if e.reference_trace is not None and e.reference_trace.num_left_out:
        parts[0] += f", of those that were kept ({e.reference_trace.num_left_out} were too large)"
    one = next(iter(outputs.values()))
    if not all(math.isfinite(output.agreement.aa) for output in outputs.values()):
        parts.append("it is not finite there")
    if len(one.wrong_calls) < one.num_calls:
        calls = listed(one.wrong_calls)
        parts.append(f"of {one.num_calls} microbatches only {calls}")
    sums = [trace.summed_output for trace in e.traces if trace.rank in outputs]
    for axis in {axis for of_rank in sums for axis in of_rank}:
        if all(axis in s and s[axis].difference < EXPLAINED for s in sums):
            parts.append(
                f"summed over {axis} it is right: the module puts out a sum that is still to be "
                f"made. Its output layout must reduce it over {axis} (Replicate() or Shard(...))"
            )
    if shape := next((output.shape for output in outputs.values() if output.shape), ""):
        parts.append(f"its shape on a rank is {shape}: its output layout is another one")
    if places := {output.elsewhere for output in outputs.values() if output.elsewhere}:
        parts.append(
            f"it is what belongs to {listed(sorted(places))}: the position or offset that it is "
            "given, or counts by itself, is not that of the rank's tokens"
        )
    factor, left = pooled([output.agreement for output in outputs.values()])
    if left < EXPLAINED and not is_near(factor, 1.0):
        same = e.factor(factor)
        parts.append(f"it is {factor:.6g} times as large{f', which is {same}' if same else ''}")
    module = module_of(first)
    style = next((t.styles[module] for t in e.traces if module in t.styles), "")
    if style:
        parts.append(f"its entry in the tensor-parallel plan is {style}")
    elif e.dims.cp_enabled and len(outputs) < len(holders[first]):
        parts.append(
            "other ranks of cp have it right, so it does not see all keys and values of the "
            "others, or sees some twice"
        )
    yield ". ".join(part[:1].upper() + part[1:] if i else part for i, part in enumerate(parts))


def explain_loss(e: Evidence) -> Iterator[str]:
    if not e.failed("loss"):
        return
    own, known = e.runs[0].steps[e.step].loss, e.reference[e.step].loss
    values = {run.steps[e.step].loss for run in e.runs}
    if strange := [value for value in values if not math.isfinite(value)]:
        yield f"the loss is {strange[0]}"
        return
    if len(values) > 1:
        yield f"ranks report different losses ({len(values)} of them): a sum over ranks is missing"
    gradients_agree = not e.failed("gradient")
    if is_near(own, known):
        return
    ratio = own / known if known else float("nan")
    same = e.factor(ratio)
    if same:
        shown = (
            ". Gradients agree, so it is the shown loss alone that is wrong"
            if gradients_agree
            else ""
        )
        way = "divided by it once too often" if ratio < 1 else "summed over it once too often"
        yield f"the loss is {ratio:.6g} times as large, which is {same}: {way}{shown}"
    elif gradients_agree:
        yield (
            f"the loss is {ratio:.6g} times as large though all gradients agree: the shown loss "
            "alone is wrong"
        )
    elif _outputs_agree(e):
        yield (
            f"the output of every module agrees, the model's logits with them, and the loss is "
            f"{ratio:.6g} times as large: the loss function, its targets, or what it is divided by "
            "is wrong"
        )


def _outputs_agree(e: Evidence) -> bool:
    """Whether outputs were looked at, and all of them agree."""
    outputs = [output for trace in e.traces for output in trace.modules.values()]
    return bool(outputs) and not any(output.wrong_calls for output in outputs)


def _wrong_backward(e: Evidence) -> str:
    """The modules between which the backward pass goes wrong, where outputs' gradients tell."""
    if not _outputs_agree(e) or e.failed("loss"):
        return ""
    worst: dict[str, float] = defaultdict(float)
    for trace in e.traces:
        for name, output in trace.modules.items():
            if output.gradient is not None:
                worst[name] = max(worst[name], output.gradient.difference)
    order = [name for name in e.forward_order if name in worst]
    wrong = [index for index, name in enumerate(order) if worst[name] > WRONG_GRADIENT]
    # An error in the backward pass stays in what is computed from it, before it in forward order.
    if not wrong or wrong[-1] == len(order) - 1 or 2 * len(wrong) <= wrong[-1]:
        return ""
    last, after = order[wrong[-1]], order[wrong[-1] + 1]
    return (
        f"in the backward pass, the gradient of the output of {last} is the first that differs, "
        f"and that of {after or 'the logits'}, right after it in the forward pass, still agrees: "
        f"what {after or 'the model'} hands back to its inputs is wrong"
    )


def unexplained(e: Evidence) -> str:
    wrong = set(e.failed("gradient"))
    if wrong:
        order = e.parameter_order
        last = max(wrong, key=lambda name: order.get(name, -1))
        ranks = ranks_of(e, lambda run: worst(run, "gradients", e.step, sorted(wrong)))
        shown = name_parameters(wrong, e.runs, "gradient")
        if place := _wrong_backward(e):
            return f"{shown} {agree(shown, 'are')} wrong and every output agrees: {place}"
        seen = "the output of every module that was looked at agrees" if _outputs_agree(e) else ""
        loss = "the loss differs" if e.failed("loss") else "the loss agrees"
        measured = f"{seen}, {loss}" if seen else loss
        where = (
            "something in the backward pass, or done to gradients after it"
            if seen and not e.failed("loss")
            else "the loss, or something that was not looked at"
        )
        return (
            f"unexplained: {measured}, and {shown} {agree(shown, 'do')} not, "
            f"{name_ranks(ranks, e.runs, range(len(e.runs)))}, first {last} in backward order, by "
            f"no factor, no sum over an axis and no share of the batch. What is left is {where}"
        )
    return "unexplained: no question has an answer; the table shows what differs"
