"""Differences in forward and backward pass: outputs, recomputation, loss; torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from titanlite.parallelize.float8.spec import Float8Section
from titanlite.tools.verify.dataflow import (
    describe_event,
    explain_backward,
    first_difference,
    outputs_agree,
    outputs_differ,
)
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
from titanlite.tools.verify.record import around, is_input, module_of
from titanlite.tools.verify.wording import agree, is_near, times


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
        for name, output in trace.events.items():
            largest[name] = max(largest[name], output.recomputed)
    # Recomputation ends early: the last that it gives may be what a module receives.
    known = (e.forward_order, e.events)
    wrong = next(filter(None, ([n for n in some if largest[n] > WRONG] for some in known)), [])
    if not wrong:
        return []
    return [
        f"activation checkpointing recomputes values that differ from the forward pass, first in "
        f"{describe_event(wrong[0]) if is_input(wrong[0]) else wrong[0]} (by "
        f"{largest[wrong[0]]:.1e}). Recomputation must have the inputs of the forward pass and "
        "save the same tensors: what it reads besides its arguments, such as a mask kept in an "
        "attribute or an operator counter, must not have changed since"
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
                f"{e.where(others, seen)}: the module that computes this layer's "
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
        f"scales{which} differ, {e.where(wrong, seen)}: the amax there is that of the rank's own "
        "part of the tensor, but the largest amax of all ranks equals that of one process. Reduce "
        "the amax (MAX) over every axis that splits the tensor: "
        + (
            "tp, which shards the weight"
            if what == "weight"
            else "tokens over data and context parallelism, features over tp"
        )
    )


def explain_forward(e: Evidence) -> Iterator[str]:
    is_later = not isinstance(e, JobEvidence) and not any(map(e.failed, ("loss", "gradient")))
    if not e.evaluates and not is_later:
        yield from first_difference(e)


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
            ")" + ": look at the loss function" * (e.wrong_line() is None)
        )
    gradients_agree = not e.failed("gradient")
    if is_near(own, known):
        return
    parts = None if e.reference_trace is None else e.reference_trace.loss_of_parts
    if parts is not None and is_near(own, parts):
        yield (
            f"the loss is over the whole batch, but it is {own:.6g}, as if each data-parallel rank "
            f"had only its own samples, instead of {known:.6g}: a rank compares its samples only "
            "with its own. Gather the outputs of all ranks before the loss"
        )
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
    elif outputs_agree(e) and _has_factor(e, ratio):
        yield (
            f"every module output agrees, but the loss and all gradients are {times(ratio)} as "
            f"large as on one process: the divisor of the loss, such as a number of targets, is "
            f"{times(1 / ratio)} what it should be"
        )
    elif outputs_agree(e):
        yield (
            f"every module output agrees, including the model's logits, but the loss is "
            f"{ratio:.6g} times as large as on one process: the loss function, its targets or its "
            "divisor is wrong"
        )


def _has_factor(e: Evidence, factor: float) -> bool:
    """Whether all gradients are this multiple of the reference's."""
    every = [part for run in e.runs for part in run.steps[e.step].gradients.values() if part.bb]
    own, left = pooled(every)
    return bool(every) and left < EXPLAINED and is_near(own, factor)


def wrong_backward(e: Evidence) -> str:
    """Where the backward pass is wrong, if the gradients of what modules return show it; or ""."""
    if not outputs_agree(e) or e.failed("loss"):
        return ""
    return next(explain_backward(e), "")


def _own_product(e: Evidence, name: str) -> str:
    """Where to look if all gradients around a weight agree, but its own does not; "" if not so."""
    known = {event for t in e.traces for event, one in t.events.items() if one.gradient is not None}
    modules = [holder_of(name), *reversed(around(holder_of(name)))]
    module = next((m for m in modules if m in map(module_of, known)), "")
    events = [event for event in e.events if event in known and module_of(event) == module]
    found = [t.events[event].gradient for t in e.traces for event in events if event in t.events]
    if not module or any(gradient is not None and gradient.error for gradient in found):
        return ""
    lines = e.lines_before(events[0], [trace.rank for trace in e.watched], is_backward=True)
    return (
        f"how {module} computes the gradient of {name}, from what it has kept of its input and in "
        f"which layout, and at what is done to it after that{lines}. The gradients that {module} "
        "receives and returns agree"
    )


def unexplained(e: Evidence, names: Collection[str] | None = None) -> str:
    """What is known of wrong gradients, all or these, that no question explains."""
    wrong = set(e.failed("gradient") if names is None else names)
    if wrong:
        order = e.parameter_order
        last = max(sorted(wrong), key=lambda name: order.get(name, -1))
        ranks = ranks_of(e, lambda run: worst(run, "gradients", e.step, sorted(wrong)))
        shown = e.named(wrong)
        if place := wrong_backward(e):
            return f"every module output agrees, but {shown} {agree(shown, 'differ')}: {place}"
        seen = "every recorded module output agrees" if outputs_agree(e) else ""
        loss = "the loss differs" if e.failed("loss") else "the loss agrees"
        measured = f"{seen}, {loss}" if seen else loss
        where = "the loss, and at what was not compared"
        if seen and not e.failed("loss"):
            where = _own_product(e, last) or (
                "the backward pass, and at what is done to gradients after it"
            )
        return (
            f"unexplained: {measured}, {'and' if e.failed('loss') else 'but'} {shown} "
            f"{agree(shown, 'differ')}, {e.where(ranks)}; {last} is the first in backward order. "
            "Neither a factor, nor a missing sum over an axis, nor a missing part of the batch "
            f"explains it. Look at {where}"
        )
    return "unexplained: no known pattern fits; the table shows what differs"
