"""What gathering weights in float8 adds to a step: the casts of shards, and their amaxes. No torch.

float8_trace.py finds the events of a cast in a trace; here they become those of another shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from titanlite.tools.planner.composition import Builder, Float8Cast, Segment
from titanlite.tools.planner.events import Communication, Event, Operator, Site


def add_cast(
    builder: Builder,
    one: Float8Cast,
    numel: int,
    over: tuple[str, int],
    place: Site,
    ready: int,
    stream: int,
) -> tuple[list[int], int]:
    """Add the cast of a shard of `numel` elements, of a weight sharded `over` an axis of ranks.

    `ready` is that of the all-gather, and `stream` the one that allocates. Returns the numbers of
    the reductions of its amax, and the bytes that it leaves allocated: the shard in float8.
    """
    numbers = []
    for event in _scaled(one.cast, one.numel, numel):
        if isinstance(event, Operator):
            builder.events.append(replace(event, place=place, is_beside=ready >= 0))
        elif isinstance(event, Communication):
            axis, size = ("tp", event.num_ranks) if event.axis == "tp" else over
            number = builder.start(event.kind, axis, event.num_bytes, size, place, ready=ready)
            numbers.append(number)
    kept = sum(one.cast.net.values()) * numel // one.numel
    most = one.cast.peak_bytes * numel // one.numel
    builder.allocate("temporary", most, stream=stream)
    builder.allocate("temporary", kept - most, stream=stream)
    return numbers, kept


def amaxes_in_advance(
    casts: Sequence[tuple[Float8Cast, int]], over: tuple[str, int], tp: int
) -> Iterator[Event]:
    """The amaxes of weights after an update; each cast has the elements of its shard.

    One reduction has the amaxes of all weights that are sharded over the same axes.
    """
    place = Site("", "optimizer")
    for one, numel in casts:
        yield from (e for e in _scaled(one.amax, one.numel, numel) if isinstance(e, Operator))
    for is_cut in dict.fromkeys(one.is_cut for one, _ in casts):
        size = sum(_amax_bytes(one) for one, _ in casts if one.is_cut == is_cut)
        yield Operator("aten::cat", 0, size, size, place, "float32")
        for axis, num_ranks in [over, *([("tp", tp)] if is_cut else [])]:
            yield Communication("all_reduce", axis, size, num_ranks, place, 0)


def _amax_bytes(one: Float8Cast) -> int:
    """The bytes of an amax, which the last operator writes."""
    return [e.bytes_written for e in one.amax.events if isinstance(e, Operator)][-1]


def _scaled(segment: Segment, traced: int, numel: int) -> Iterator[Event]:
    """The events for a shard of `numel` elements instead of `traced`; scalars stay."""

    def scaled(num_bytes: int) -> int:
        return num_bytes * numel // traced if num_bytes >= traced else num_bytes

    for event in segment.events:
        if isinstance(event, Operator):
            yield replace(
                event,
                bytes_read=scaled(event.bytes_read),
                bytes_written=scaled(event.bytes_written),
            )
        else:
            yield event
