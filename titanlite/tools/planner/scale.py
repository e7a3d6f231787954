"""The pieces of a larger microbatch from those of two smaller ones. No torch.

Every figure of an operator, a communication or a stretch of memory is linear in the number of
sequences. A peak may move to another place as they grow; then it is underestimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from titanlite.tools.planner.composition import ModelPart, Pieces, Segment
from titanlite.tools.planner.events import Communication, Event, Operator


def scaled(one: Pieces, two: Pieces, factor: int) -> Pieces | None:
    """The pieces for `factor` times the sequences of `one`; `two` has twice as many.

    None if the two differ in more than size. The events of a step's start are those of `two`.
    """
    try:
        return replace(
            two,
            before=_part(one.before, two.before, factor),
            blocks=tuple(_part(*pair, factor) for pair in zip(one.blocks, two.blocks, strict=True)),
            after=_part(one.after, two.after, factor),
            start=replace(two.start, net=_bytes(one.start.net, two.start.net, factor)),
            end=_segment(one.end, two.end, factor),
            boundary_bytes=_at(one.boundary_bytes, two.boundary_bytes, factor),
            output_bytes=_at(one.output_bytes, two.output_bytes, factor),
            saved_output_bytes=_at(one.saved_output_bytes, two.saved_output_bytes, factor),
        )
    except ValueError:
        return None


def _part(one: ModelPart, two: ModelPart, factor: int) -> ModelPart:
    return replace(
        two,
        forward=_segment(one.forward, two.forward, factor),
        backward=_segment(one.backward, two.backward, factor),
        late_bytes=_at(one.late_bytes, two.late_bytes, factor),
        recomputed_bytes=_at(one.recomputed_bytes, two.recomputed_bytes, factor),
        peak_again=_bytes(one.peak_again, two.peak_again, factor),
        peaks_holding=(
            _bytes(one.peaks_holding[0], two.peaks_holding[0], factor),
            _bytes(one.peaks_holding[1], two.peaks_holding[1], factor),
        ),
        around_experts=tuple(
            _segment(*pair, factor)
            for pair in zip(one.around_experts, two.around_experts, strict=True)
        ),
    )


def _segment(one: Segment, two: Segment, factor: int) -> Segment:
    first, more = _repeated(one.events, two.events)
    pairs = zip(one.events, two.events[:first] + two.events[first + len(more) :], strict=True)
    events = [_event(*pair, factor) for pair in pairs]
    events[first:first] = more * (factor - 1)
    net, peak = _bytes(one.net, two.net, factor), _bytes(one.peak, two.peak, factor)
    return Segment(tuple(events), net, peak, two.peak_place)


def _repeated(one: Sequence[Event], two: Sequence[Event]) -> tuple[int, list[Event]]:
    """What `two` has more of than `one`, and where: further chunks of a loop, as of the loss."""
    names = [[getattr(event, "name", type(event)) for event in of] for of in (one, two)]
    pairs = enumerate(zip(*names, strict=False))
    first = next((place for place, (own, other) in pairs if own != other), len(one))
    more = list(two[first : first + len(two) - len(one)])
    if not all(isinstance(event, Operator) for event in more):
        raise ValueError
    return first, more


def _event(one: Event, two: Event, factor: int) -> Event:
    if type(one) is not type(two):
        raise ValueError
    if isinstance(one, Operator) and isinstance(two, Operator):
        if one.name != two.name:
            raise ValueError
        return replace(
            two,
            flops=_at(one.flops, two.flops, factor),
            bytes_read=_at(one.bytes_read, two.bytes_read, factor),
            bytes_written=_at(one.bytes_written, two.bytes_written, factor),
            shape=tuple(_at(*pair, factor) for pair in zip(one.shape, two.shape, strict=True)),
        )
    if isinstance(one, Communication) and isinstance(two, Communication):
        if (one.kind, one.axis) != (two.kind, two.axis):
            raise ValueError
        return replace(two, num_bytes=_at(one.num_bytes, two.num_bytes, factor))
    return two


def _bytes(one: Mapping[str, int], two: Mapping[str, int], factor: int) -> dict[str, int]:
    return {name: _at(one.get(name, 0), two.get(name, 0), factor) for name in {**one, **two}}


def _at(one: int, two: int, factor: int) -> int:
    """The value at `factor` of the line through (1, one) and (2, two)."""
    return one + (two - one) * (factor - 1)
