"""Predicted pipelines whose blocks and messages take given times, worked out by hand."""

from dataclasses import replace

import pytest

from tests.benchmarks.paused_model import BACKWARD_SECONDS, FORWARD_SECONDS
from tests.benchmarks.plan_timelines import Case, predict
from titanlite.schedule import Span
from titanlite.tools.planner.hardware import Hardware, OperatorCost, load_hardware

LATENCY = 0.06
# Two of the four blocks on each rank.
F, B = 2 * FORWARD_SECONDS, 2 * BACKWARD_SECONDS


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    """A CPU on which nothing takes time but pauses and messages."""
    cpu = load_hardware("cpu")
    none = dict.fromkeys(("launch", "collective", "unshard", "message", "step"), 0.0)
    return replace(
        cpu,
        memory=replace(cpu.memory, bytes_per_second=1e18),
        flops_per_second={"float32": 1e18},
        overhead=replace(cpu.overhead, **{f"{name}_seconds": none[name] for name in none}),
        operators=dict.fromkeys(cpu.operators, OperatorCost(0.0)),
    )


def spans(case: Case, hardware: Hardware) -> list[tuple[int, str, int, int]]:
    """(rank, kind, microbatch, start) of all actions, the start in milliseconds."""

    def of(span: Span) -> tuple[int, str, int, int]:
        assert span.microbatch is not None
        return span.row, span.kind, span.microbatch, round(span.start)

    work = [one for one in predict(case, hardware).spans if one.stage is not None]
    return sorted(map(of, work))


def ms(seconds: float) -> int:
    return round(1e3 * seconds)


def test_1f1b_waits_for_what_it_has_sent(hardware: Hardware) -> None:
    case = Case("1F1B", "1F1B", 2, 2, LATENCY, 1e18)
    # The last stage sends its first gradient before its second forward pass, and waits for both.
    first = F + LATENCY
    second = first + F + B + LATENCY
    assert spans(case, hardware) == [
        (0, "B", 0, ms(second)),
        (0, "B", 1, ms(second + F + B + LATENCY)),
        (0, "F", 0, 0),
        (0, "F", 1, ms(F)),
        (1, "B", 0, ms(first + F)),
        (1, "B", 1, ms(second + F)),
        (1, "F", 0, ms(first)),
        (1, "F", 1, ms(second)),
    ]


def test_other_schedules_send_beside_their_work(hardware: Hardware) -> None:
    case = Case("GPipe", "GPipe", 2, 2, LATENCY, 1e18)
    first = F + LATENCY
    turn = first + 2 * F
    assert spans(case, hardware) == [
        (0, "B", 0, ms(turn + B + LATENCY)),
        (0, "B", 1, ms(turn + 2 * B + LATENCY)),
        (0, "F", 0, 0),
        (0, "F", 1, ms(F)),
        (1, "B", 0, ms(turn)),
        (1, "B", 1, ms(turn + B)),
        (1, "F", 0, ms(first)),
        (1, "F", 1, ms(first + F)),
    ]
