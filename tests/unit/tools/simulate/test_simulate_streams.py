"""Streams in virtual time: figures worked out by hand, and properties of any programs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.tools.simulate import SimulationError
from titanlite.tools.simulate.streams import (
    MAIN,
    Compute,
    Item,
    StreamTransfer,
    WaitFor,
    run_streams,
)

PORTS = ("node out", "node in")


def transfer(number: int, seconds: float, stream: str = "tp", **others: object) -> StreamTransfer:
    values = {"links": PORTS, "num_bytes": 10 * seconds, **others}
    return StreamTransfer(number, stream, 0.0, seconds, **values)  # type: ignore[arg-type]


def test_a_transfer_is_hidden_until_it_is_waited_for() -> None:
    program = [transfer(1, 3.0), Compute(1.0, "F"), WaitFor(1), Compute(1.0, "B")]
    found = run_streams(program, keep_spans=True)
    assert found.seconds == 4
    assert found.compute == {"F": 1, "B": 1}
    traffic = found.traffic["tp", ""]
    assert (traffic.num_bytes, traffic.busy_seconds) == (30, 3)
    assert traffic.exposed_seconds == 2
    assert [(span.start, span.end) for span in found.spans if span.stream == "tp"] == [(0, 3)]
    assert [span.label for span in found.spans if span.stream == MAIN] == ["F", "B"]


def test_transfers_of_a_stream_run_one_after_another_and_share_links_with_other_streams() -> None:
    queued = [transfer(1, 2.0), transfer(2, 2.0), WaitFor(1), WaitFor(2)]
    assert run_streams(queued).seconds == 4
    shared = [transfer(1, 2.0), transfer(2, 3.0, "dp"), WaitFor(1), WaitFor(2)]
    found = run_streams(shared, keep_spans=True)
    ends = {span.stream: span.end for span in found.spans}
    assert ends == {"tp": 4, "dp": 5}
    apart = [transfer(1, 2.0), transfer(2, 3.0, "dp", links=("fabric out",)), WaitFor(1)]
    assert {s.stream: s.end for s in run_streams(apart, keep_spans=True).spans} == {
        "tp": 2,
        "dp": 3,
    }


def test_a_transfer_starts_after_those_of_other_streams_that_it_names() -> None:
    first, other = transfer(1, 2.0), transfer(2, 1.0, "copies", links=("host in",))
    gather = transfer(3, 3.0, "dp", links=("fabric out",))._replace(after=(1, 2))
    found = run_streams([first, other, gather, WaitFor(3)], keep_spans=True)
    assert {span.stream: (span.start, span.end) for span in found.spans} == {
        "tp": (0, 2),
        "copies": (0, 1),
        "dp": (2, 5),
    }
    # What has ended holds nothing up.
    later = [first, Compute(4.0), gather._replace(after=(1,)), WaitFor(3)]
    assert run_streams(later).seconds == 7
    with pytest.raises(SimulationError, match="comes after transfer 9, which was not issued"):
        run_streams([gather._replace(after=(9,))])


def test_rates_are_max_min_fair() -> None:
    # Two transfers arrive at a port at half the rate each; the sender of one also sends to another
    # port, by which a third transfer takes the other half of the sender's.
    found = run_streams(
        [
            transfer(1, 1.0, "0 to 1", links=("out of 0", "into 1")),
            transfer(2, 2.0, "2 to 1", links=("out of 2", "into 1")),
            transfer(3, 2.0, "0 to 3", links=("out of 0", "into 3")),
        ],
        keep_spans=True,
    )
    # Half the rate for 2 seconds, then the whole.
    assert {span.stream: span.end for span in found.spans} == {
        "0 to 1": 2,
        "2 to 1": 3,
        "0 to 3": 3,
    }


def test_a_host_launches_ahead_of_its_device() -> None:
    long_first = [Compute(10.0, "F", 1.0), *[Compute(0.5, "F", 1.0)] * 8]
    found = run_streams(long_first)
    # The host has launched all by 9, before the device is free at 11.
    assert found.seconds == 15
    assert found.launch_seconds == 1
    short = run_streams([Compute(0.5, "F", 1.0)] * 8)
    assert short.seconds == 8.5
    assert short.launch_seconds == 4.5


@st.composite
def programs_of_one_rank(draw: st.DrawFn) -> list[Item]:
    seconds = st.integers(0, 8).map(lambda eighths: eighths / 8)
    items: list[Item] = []
    pending: list[int] = []
    for number in range(draw(st.integers(1, 12))):
        match draw(st.sampled_from("CTTW")):
            case "C":
                items.append(Compute(draw(seconds), draw(st.sampled_from("FB"))))
            case "T":
                link = draw(st.sampled_from((PORTS, PORTS[:1], ("fabric out",), ())))
                stream = draw(st.sampled_from(("tp", "dp", "cp")))
                pending.append(number)
                items.append(
                    StreamTransfer(number, stream, draw(seconds), draw(seconds), 8.0, "x", link)
                )
            case "W" if pending:
                items.append(WaitFor(pending.pop(draw(st.integers(0, len(pending) - 1)))))
    return items


@settings(max_examples=150, deadline=None)
@given(programs_of_one_rank())
def test_nothing_is_lost_and_the_unit_is_free(program: list[Item]) -> None:
    found = run_streams(program, keep_spans=True)
    work = sum(item.seconds for item in program if isinstance(item, Compute))
    moved = [item for item in program if isinstance(item, StreamTransfer)]
    assert sum(found.compute.values()) == work
    assert sum(one.num_bytes for one in found.traffic.values()) == 8 * len(moved)
    assert sum(one.count for one in found.traffic.values()) == len(moved)
    exposed = sum(one.exposed_seconds for one in found.traffic.values())
    assert work + exposed + found.idle_seconds == pytest.approx(found.seconds)
    # A link cannot move more than its rate allows, nor can everything take longer than in turn.
    for link in (*PORTS, "fabric out"):
        busy = sum(item.seconds for item in moved if link in item.links)
        assert found.seconds >= busy - 1e-9
    in_turn = work + sum(item.seconds + item.latency_seconds for item in moved)
    assert found.seconds <= in_turn + 1e-9
    # Spans of one stream do not overlap.
    for stream in {span.stream for span in found.spans}:
        spans = sorted((s.start, s.end) for s in found.spans if s.stream == stream)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))

    def scaled(item: Item) -> Item:
        if isinstance(item, Compute):
            return item._replace(seconds=1000 * item.seconds)
        if isinstance(item, StreamTransfer):
            latency = 1000 * item.latency_seconds
            return item._replace(seconds=1000 * item.seconds, latency_seconds=latency)
        return item

    other = run_streams([scaled(item) for item in program])
    assert other.seconds == pytest.approx(1000 * found.seconds)


@settings(max_examples=80, deadline=None)
@given(programs_of_one_rank())
def test_immediate_waits_leave_no_overlap(program: list[Item]) -> None:
    items: list[Item] = []
    for item in program:
        if isinstance(item, WaitFor):
            continue
        items.append(item)
        if isinstance(item, StreamTransfer):
            items.append(WaitFor(item.number))
    found = run_streams(items)
    work = sum(item.seconds for item in items if isinstance(item, Compute))
    moved = sum(i.seconds + i.latency_seconds for i in items if isinstance(i, StreamTransfer))
    assert found.seconds == pytest.approx(work + moved)
    traffic = found.traffic.values()
    hidden = sum(one.busy_seconds - one.exposed_seconds for one in traffic)
    assert hidden == pytest.approx(0, abs=1e-9)
    assert found.idle_seconds == pytest.approx(0, abs=1e-9)


def test_a_program_waits_for_what_it_has_issued() -> None:
    with pytest.raises(SimulationError, match="never issued"):
        run_streams([WaitFor(7)])
    assert run_streams([]).seconds == 0
    assert run_streams([], keep_spans=True).spans == []
