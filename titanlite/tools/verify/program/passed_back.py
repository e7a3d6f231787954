"""What a line passes back of a wrong gradient, in words; torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from titanlite.tools.verify.dataflow import describe_event
from titanlite.tools.verify.evidence import EXPLAINED, Evidence
from titanlite.tools.verify.record import Through
from titanlite.tools.verify.wording import is_near, listed, times

ROUNDING = 1e-9


def describe_through(
    e: Evidence, event: str, found: Sequence[Sequence[Through]], plain: Collection[float]
) -> str:
    """Which part of the gradient of `event` has to be summed or scaled; "" if none explains it.

    `found` is what each rank measured for the same lines in forward order; `plain` are the factors
    that a right gradient may have, as of a mean over the ranks' samples.
    """
    sent = {line: to for trace in e.watched for line, to in trace.sent_from.items()}
    lines = list(zip(*found, strict=True))
    for of_line in reversed(lines):
        for axis in e.dims.axes_in_use:
            # Ranks of other stages have no part of it.
            sums = [one.sums.get(axis) for one in of_line if one.sums]
            is_right = sums and all(one is not None and one[1] < EXPLAINED for one in sums)
            if is_right and _is_same_along(e, axis, of_line):
                return (
                    f"With the sum over {axis} of what comes back through {of_line[0].line}, the "
                    f"gradient of {describe_event(event)} is correct: all ranks have that value, "
                    "but each uses it for its own part of the work, so its gradient is a share. "
                    f"All-reduce it over {axis} in the backward pass, before it goes on"
                )
    for of_line in lines:
        for axis in e.dims.axes_in_use:
            arrived = [one.arrived.get(axis) for one in of_line if one.sums]
            if arrived and all(one is not None and one[1] < EXPLAINED for one in arrived):
                name = of_line[0].function
                return (
                    f"The gradient that arrives at what {name} gives to {of_line[0].line} is each "
                    f"rank's share: only its sum over {axis} is right. {name}.backward has to add "
                    f"up what the ranks have, as by a reduce-scatter over {axis}, before each "
                    "takes its own part"
                )
    scaled = [(own[0].line, scales) for own in lines if (scales := _scales(own, plain))]
    cancelled = [line for line, own in scaled if all(abs(n) > 1 / ROUNDING for n in own)]
    if len(cancelled) == 1:
        (line,) = cancelled
        through = f", in the backward pass of {sent[line]}" * (line in sent)
        return (
            f"What comes back through {line} is zero on one process, but for rounding, and here it "
            f"is not{through}: what cancels, such as a maximum that is subtracted again, needs no "
            "gradient (detach it)"
        )
    # Where a collective sends it, that may be the cause. Two parts may each be the wrong one.
    scaled = [one for one in scaled if one[0] in sent] or scaled
    if not scaled or any(
        not is_near(a, b) for _, own in scaled for a, b in zip(own, scaled[0][1], strict=False)
    ):
        return ""
    line, scales = scaled[-1]
    start, end = f"What comes back through {line} is", "as large as it should be, beside the rest"
    if not all(is_near(scale, scales[0]) for scale in scales):
        shown = listed([f"{scale:.4g}" for scale in dict.fromkeys(scales)], 4)
        return (
            f"{start} {shown} times {end}, by a factor of its own in each part of the batch: "
            "is it divided by what the rank, or the microbatch, counts of its own (tokens, "
            "samples)? Divide by the count of the whole batch"
        )
    scale = scales[0]
    why = f"{start} {times(scale)} {end}{e.equals(scale)}"
    if line in sent:
        why += f". It goes through {sent[line]}: "
        why += (
            "if its backward pass sums what each rank has whole, pass that on as it is"
            if scale > 1
            else "if each rank has a share of its gradient, its backward pass has to sum them"
        )
    return why


def describe_lines(e: Evidence) -> str:
    """Between which lines of the caller's code a gradient becomes wrong; "" if that is unknown."""
    for trace in e.watched:
        if trace.extreme:
            return (
                f"{trace.wrong_gradient[1]} computes values of which {trace.extreme} is that of "
                f"one process. The gradient of {trace.extreme} belongs only to the rank that has "
                "it, but each rank takes all of it: the backward pass of the all-reduce has to "
                "give the other ranks zeros"
            )
    line, *readers = next((t.wrong_gradient for t in e.watched if t.wrong_gradient), ("",))
    line = line or "the model"
    if readers and set(readers) == {line}:
        return f"What comes back to {line} is right, but what that line passes on is not"
    readers = [one for one in dict.fromkeys(readers) if one != line]
    if not readers:
        return ""
    is_one = len(readers) == 1
    return (
        f"The gradient of what {line} computes is wrong, but what comes back to "
        f"{listed(readers, 4)}, which {'reads' if is_one else 'read'} it, is right: look at how "
        f"{'that line' if is_one else 'each of these lines'} passes it on"
    )


def _is_same_along(e: Evidence, axis: str, found: Sequence[Through]) -> bool:
    """Whether ranks that differ on this axis alone compute the same in a line."""
    own = {
        (one.digest, *sorted({**run.coordinates, axis: 0}.items()))
        for run, one in zip(e.runs, found, strict=True)
    }
    return len(own) == len({one[1:] for one in own})


def _scales(found: Sequence[Through], plain: Collection[float]) -> list[float]:
    """How many times too large what comes back through a line is, for each rank and microbatch."""
    fits = [fit for one in found for fit in one.scales if fit is not None]
    if not fits or not all(left < EXPLAINED for _, left in fits):
        return []
    rest = fits[0][0][0]
    is_plain = any(is_near(rest, factor) for factor in plain)
    if not is_plain or not all(is_near(own, rest) for (own, _), _ in fits):
        return []
    scales = [rest / share if share else math.inf for (_, share), _ in fits]
    return [] if all(is_near(scale, 1.0) for scale in scales) else scales
