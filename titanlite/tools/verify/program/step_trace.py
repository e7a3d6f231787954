"""On a rank: what the caller's lines do in the optimizer's step.

Which draw random numbers, and which take the norm of this rank's gradients alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor

from titanlite.tools.verify.events import Events, OperatorWatch
from titanlite.tools.verify.program.building import Built
from titanlite.tools.verify.program.code_trace import CodeTracer
from titanlite.tools.verify.program.lines import wrong_lines
from titanlite.tools.verify.program.values import RANDOM, Values
from titanlite.tools.verify.record import RankTrace, WrongLine
from titanlite.tools.verify.subject import Subject
from titanlite.tools.verify.tracing import gathered
from titanlite.tools.verify.watching import listening
from titanlite.tools.verify.wording import is_near

# How near a sum of squares is to that of the whole gradient.
EQUAL = 1e-9


def watch_step(
    built: Built,
    tracer: CodeTracer,
    gradients: Mapping[str, Tensor],
    known: Values,
    trace: RankTrace,
) -> None:
    """Clip and make a step, and note in `trace` the lines that draw random numbers, those whose
    results are wrong, and one that takes the norm of this rank's gradients alone, with the axes
    over which it is a part.

    `gradients` and the values `known` of the step are those of one process. Every rank of the world
    must call this.
    """
    kept = Events()
    # It fails on every rank or on none: the step has run before, without this mode.
    with contextlib.suppress(Exception), OperatorWatch(kept, keeps_values=True), listening(kept):
        built.clip()
        built.optimizer.step()
    drawn = {
        line: None
        for (_, line, operator), _ in kept.values.places
        if operator.removeprefix("aten.").startswith(RANDOM)
    }
    trace.drawn = tuple(drawn)
    trace.own_norm = next(_norms_of_own(kept.values, tracer.subject, gradients), ())
    lines, read, *_ = wrong_lines(tracer, kept.values, known, 1)
    trace.step_lines = *read, *lines


def lines_of_step(built: Built, tracer: CodeTracer, known: Values) -> tuple[WrongLine, ...]:
    """Make a step that leaves the right weights; returns the lines that read a share as a number.

    Every rank of the world must call this.
    """
    kept = Events()
    with OperatorWatch(kept, keeps_values=True), listening(kept):
        built.optimizer.step()
    return wrong_lines(tracer, kept.values, known, 1)[1]


def _norms_of_own(
    values: Values, subject: Subject, gradients: Mapping[str, Tensor]
) -> Iterator[tuple[str, ...]]:
    """The lines whose numbers, or their squares, are parts of the sum of all gradients' squares;
    and of which axes. Numbers that are reduced later, perhaps those of all parameters, are not.
    """
    square = sum(whole.double().square().sum().item() for whole in gradients.values())
    sent = {number: values.tensors[number] for number in values.exchanged}
    most = 2 * len(gradients)
    reduced = {number for number, one in sent.items() if one is not None and one.numel() <= most}
    for number in reversed(range(len(values.places))):
        reduced.update(values.sources[number] if number in reduced else ())
    own = {
        values.places[number][0]: one.item()
        for number, one in enumerate(values.tensors)
        if one is not None and one.numel() == 1 and one.is_floating_point()
        if number not in reduced
    }
    everyone = gathered(own)
    groups = {a: dist.get_process_group_ranks(group) for a, group in subject.groups.items()}
    if len(groups) > 1:
        groups[" and ".join(groups)] = list(range(len(everyone)))
    for axes, ranks in groups.items():
        for key in own:
            of_ranks = [everyone[rank].get(key) for rank in ranks]
            numbers = [one for one in of_ranks if one is not None]
            sums = sum(numbers), sum(one * one for one in numbers)
            is_whole = any(is_near(n, square, EQUAL) for one in numbers for n in (one, one * one))
            is_sum = any(is_near(total, square, EQUAL) for total in sums)
            if is_sum and not is_whole and len(numbers) == len(ranks):
                yield key[1], axes
