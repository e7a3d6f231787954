"""Streams in virtual time: figures worked out by hand, and properties of any programs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.tools.simulate import SimulationError
from titanlite.tools.simulate.streams import (
    MAIN,
    Compute,
    Item,
    StreamTimes,
    Transfer,
    WaitFor,
    run_streams,
)

PORTS = ("node out", "node in")


def transfer(number: int, seconds: float, stream: str = "tp", **others: object) -> Transfer:
    values = {"links": PORTS, "num_bytes": 10 * seconds, **others}
    return Transfer(number, stream, 0.0, seconds, **values)  # type: ignore[arg-type]


def test_a_transfer_is_hidden_until_it_is_waited_for() -> None:
    program = [transfer(1, 3.0), Compute(1.0, "F"), WaitFor(1), Compute(1.0, "B")]
    found = run_streams({0: program}, keep_spans=True)
    times = found.ranks[0]
    assert found.seconds == 4
    assert times.compute == {"F": 1, "B": 1}
    traffic = times.traffic["tp", ""]
    assert (traffic.num_bytes, traffic.busy_seconds) == (30, 3)
    assert (traffic.exposed_seconds, traffic.hidden_seconds) == (2, 1)
    drawn = found.timeline("a step")
    assert drawn.rows == ["rank 0 compute", "rank 0 tp"]
    assert [(span.row, span.start, span.end) for span in drawn.spans if span.row == 1] == [
        (1, 0, 3)
    ]


def test_transfers_of_a_stream_run_one_after_another_and_share_links_with_other_streams() -> None:
    queued = [transfer(1, 2.0), transfer(2, 2.0), WaitFor(1), WaitFor(2)]
    assert run_streams({0: queued}).seconds == 4
    shared = [transfer(1, 2.0), transfer(2, 3.0, "dp"), WaitFor(1), WaitFor(2)]
    found = run_streams({0: shared}, keep_spans=True)
    ends = {span.stream: span.end for span in found.spans}
    assert ends == {"tp": 4, "dp": 5}
    apart = [transfer(1, 2.0), transfer(2, 3.0, "dp", links=("fabric out",)), WaitFor(1)]
    assert {s.stream: s.end for s in run_streams({0: apart}, keep_spans=True).spans} == {
        "tp": 2,
        "dp": 3,
    }


def test_a_transfer_starts_after_those_of_other_streams_that_it_names() -> None:
    first, other = transfer(1, 2.0), transfer(2, 1.0, "copies", links=("host in",))
    gather = transfer(3, 3.0, "dp", links=("fabric out",))._replace(after=(1, 2))
    found = run_streams({0: [first, other, gather, WaitFor(3)]}, keep_spans=True)
    assert {span.stream: (span.start, span.end) for span in found.spans} == {
        "tp": (0, 2),
        "copies": (0, 1),
        "dp": (2, 5),
    }
    # What has ended holds nothing up; neither rank of a pair starts before both can.
    later = [first, Compute(4.0), gather._replace(after=(1,)), WaitFor(3)]
    assert run_streams({0: later}).seconds == 7
    pair = [gather._replace(partners=(1,), after=(1,)), gather._replace(partners=(0,), after=())]
    both = run_streams({0: [first, pair[0]], 1: [pair[1]]})
    assert both.seconds == 5
    with pytest.raises(SimulationError, match="comes after transfer 9, which was not issued"):
        run_streams({0: [gather._replace(after=(9,))]})


def test_rates_are_max_min_fair() -> None:
    # Rank 1 receives from ranks 0 and 2 at half the rate each; rank 0 also sends to rank 3, which
    # takes the other half of rank 0's port.
    def message(number: int, seconds: float, source: int, target: int, own: int) -> Transfer:
        port, partner = ("out", target) if own == source else ("in", source)
        meeting = f"{source} to {target}"
        stream = f"{meeting} {port}"
        return Transfer(number, stream, 0.0, seconds, links=(port,), partners=(partner,),
                        meeting=meeting)  # fmt: skip

    found = run_streams(
        {
            0: [message(1, 1.0, 0, 1, 0), message(2, 2.0, 0, 3, 0)],
            1: [message(1, 1.0, 0, 1, 1), message(2, 2.0, 2, 1, 1)],
            2: [message(1, 2.0, 2, 1, 2)],
            3: [message(1, 2.0, 0, 3, 3)],
        },
        keep_spans=True,
    )
    ends = {(span.rank, span.stream): span.end for span in found.spans}
    assert ends[0, "0 to 1 out"] == ends[1, "0 to 1 in"] == 2
    # Half the rate for 2 seconds, then the whole.
    assert ends[3, "0 to 3 in"] == ends[2, "2 to 1 out"] == 3


def test_a_host_launches_ahead_of_its_device() -> None:
    long_first = [Compute(10.0, "F", 1.0), *[Compute(0.5, "F", 1.0)] * 8]
    found = run_streams({0: long_first})
    # The host has launched all by 9, before the device is free at 11.
    assert found.seconds == 15
    assert found.ranks[0].launch_seconds == 1
    short = run_streams({0: [Compute(0.5, "F", 1.0)] * 8})
    assert short.seconds == 8.5
    assert short.ranks[0].launch_seconds == 4.5


def pipeline(num_stages: int, num_batches: int, forward: float, backward: float) -> StreamTimes:
    """1F1B with messages that take no time."""

    def message(kind: str, stage: int, other: int, what: str, batch: int, number: int) -> Transfer:
        ends = (stage, other) if kind == "send" else (other, stage)
        stream = f"{kind} {other} {what}"
        return Transfer(number, stream, 0.0, 0.0, partners=(other,), meeting=f"{what} {ends}")

    programs: dict[int, list[Item]] = {}
    for stage in range(num_stages):
        items: list[Item] = []
        count = 0

        def run(kind: str, batch: int, stage: int = stage, items: list[Item] = items) -> None:
            nonlocal count
            source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            if 0 <= source < num_stages:
                count += 1
                items.append(message("receive", stage, source, kind, batch, count))
                items.append(WaitFor(count))
            items.append(Compute(forward if kind == "F" else backward, kind))
            if 0 <= target < num_stages:
                count += 1
                items.append(message("send", stage, target, kind, batch, count))

        ahead = min(num_batches, num_stages - stage)
        order = [("F", batch) for batch in range(ahead)]
        for batch in range(num_batches):
            order.append(("B", batch))
            if batch + ahead < num_batches:
                order.append(("F", batch + ahead))
        for kind, batch in order:
            run(kind, batch)
        programs[stage] = items
    return run_streams(programs)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_a_1f1b_pipeline_has_the_known_bubble(
    num_stages: int, more: int, forward: int, backward: int
) -> None:
    num_batches = num_stages - 1 + more
    found = pipeline(num_stages, num_batches, forward, backward)
    assert found.seconds == (num_batches + num_stages - 1) * (forward + backward)
    share = (num_stages - 1) / (num_batches + num_stages - 1)
    for times in found.ranks.values():
        assert times.idle_seconds / found.seconds == pytest.approx(share)


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
                items.append(Transfer(number, stream, draw(seconds), draw(seconds), 8.0, "x", link))
            case "W" if pending:
                items.append(WaitFor(pending.pop(draw(st.integers(0, len(pending) - 1)))))
    return items


@settings(max_examples=150, deadline=None)
@given(programs_of_one_rank())
def test_nothing_is_lost_and_the_unit_is_free(program: list[Item]) -> None:
    found = run_streams({0: program}, keep_spans=True)
    times = found.ranks[0]
    work = sum(item.seconds for item in program if isinstance(item, Compute))
    moved = [item for item in program if isinstance(item, Transfer)]
    assert sum(times.compute.values()) == work
    assert sum(one.num_bytes for one in times.traffic.values()) == 8 * len(moved)
    assert sum(one.count for one in times.traffic.values()) == len(moved)
    exposed = sum(one.exposed_seconds for one in times.traffic.values())
    assert work + exposed + times.idle_seconds == pytest.approx(found.seconds)
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
        if isinstance(item, Transfer):
            latency = 1000 * item.latency_seconds
            return item._replace(seconds=1000 * item.seconds, latency_seconds=latency)
        return item

    other = run_streams({0: [scaled(item) for item in program]})
    assert other.seconds == pytest.approx(1000 * found.seconds)


@settings(max_examples=80, deadline=None)
@given(programs_of_one_rank())
def test_immediate_waits_leave_no_overlap(program: list[Item]) -> None:
    items: list[Item] = []
    for item in program:
        if isinstance(item, WaitFor):
            continue
        items.append(item)
        if isinstance(item, Transfer):
            items.append(WaitFor(item.number))
    found = run_streams({0: items})
    work = sum(item.seconds for item in items if isinstance(item, Compute))
    moved = sum(i.seconds + i.latency_seconds for i in items if isinstance(i, Transfer))
    assert found.seconds == pytest.approx(work + moved)
    traffic = found.ranks[0].traffic.values()
    assert sum(one.hidden_seconds for one in traffic) == pytest.approx(0, abs=1e-9)
    assert found.ranks[0].idle_seconds == pytest.approx(0, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(programs_of_one_rank(), st.integers(2, 4))
def test_ranks_that_do_the_same_take_the_same_time(program: list[Item], num_ranks: int) -> None:
    alone = run_streams({0: program})

    def of(rank: int) -> list[Item]:
        partners = tuple(other for other in range(num_ranks) if other != rank)
        return [
            item._replace(partners=partners, meeting=item.stream)
            if isinstance(item, Transfer)
            else item
            for item in program
        ]

    together = run_streams({rank: of(rank) for rank in range(num_ranks)})
    assert together.seconds == pytest.approx(alone.seconds)
    for times in together.ranks.values():
        assert times.compute == alone.ranks[0].compute
        assert times.traffic.keys() == alone.ranks[0].traffic.keys()


def test_the_slowest_partner_starts_a_transfer() -> None:
    meeting = {"partners": (1,), "meeting": "tp"}
    first = [Compute(1.0), transfer(1, 1.0, **meeting), WaitFor(1)]
    second = [Compute(5.0), transfer(1, 1.0, partners=(0,), meeting="tp"), WaitFor(1)]
    found = run_streams({0: first, 1: second})
    assert found.seconds == 6
    # Rank 0 waits for rank 1, which is not the communication's fault.
    assert found.ranks[0].idle_seconds == 4
    assert found.ranks[0].traffic["tp", ""].exposed_seconds == 1


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    def order(rank: int, meetings: str) -> list[Item]:
        return [
            transfer(n, 1.0, partners=(1 - rank,), meeting=meeting, label=meeting)
            for n, meeting in enumerate(meetings)
        ]

    with pytest.raises(SimulationError, match="rank 0 waits forever for a on tp"):
        run_streams({0: order(0, "ab"), 1: order(1, "ba")})
    with pytest.raises(SimulationError, match="never issued"):
        run_streams({0: [WaitFor(7)]})
    assert run_streams({}).seconds == 0
    assert MAIN not in {span.stream for span in run_streams({0: []}, keep_spans=True).spans}
