"""What `titanlite plan --calibrate` makes of its measurements; measuring itself is a slow test."""

import math

import pytest

from titanlite.config import JobConfig
from titanlite.tools.planner.calibrate import hardware_text
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.events import Communication, Operator, Site
from titanlite.tools.planner.hardware import parse_hardware
from titanlite.tools.planner.measure import COLLECTIVES, SIZES, Sample
from titanlite.tools.simulate.network import bytes_sent

PLACE = Site("", "forward")
RATE, LATENCY, PEER = 2e9, 1e-4, 5e-5


def sample(name: str, num_bytes: int, flops: int = 0, dtype: str = "float32") -> Sample:
    """An operator at 1 GB/s and 10 GFLOP/s."""
    shape = (1, 8, 8, 8) if flops else ()
    operator = Operator(name, flops, num_bytes // 2, num_bytes // 2, PLACE, dtype, shape)
    return operator, num_bytes / 1e9 + flops / 1e10


def tiny_job(**plan: int) -> JobConfig:
    degrees = {"data_parallel_shard_degree": 1, **plan}
    return JobConfig.from_dict(
        {
            "model": {"flavor": "debug"},
            "training": {"dataset": "synthetic", "global_batch_size": 4, "local_batch_size": 4},
            "parallelism": degrees,
            "activation_checkpoint": {"mode": "none"},
        }
    )


def test_the_file_has_the_costs_of_the_measurements() -> None:
    sizes = (10**5, 10**6, 10**7)
    samples = [sample("aten::mul", size) for size in sizes]
    samples += [sample("aten::mm", size, 50 * size) for size in sizes]
    samples += [sample("aten::mm", size, 200 * size) for size in sizes]
    transfers = [
        (kind, size, ranks, LATENCY + PEER * (ranks - 1) + bytes_sent(kind, size, ranks) / RATE)
        for kind in COLLECTIVES
        for size in SIZES
        for ranks in (2, 4)
    ]
    # A step takes longer than its operators.
    steps = [(0.5, tiny_job())]
    found = parse_hardware(hardware_text(samples, steps, transfers, 0.005), "cpu.toml")
    assert found.kind == "cpu"
    cost = Cost(found)
    for one, seconds in samples:
        more = cost.operator(one) - found.overhead.launch_seconds
        assert more == pytest.approx(seconds, rel=0.02)
    message = Communication("all_gather", "tp", 1 << 20, 3, PLACE, 1)
    expected = LATENCY + 2 * PEER + (1 << 20) * 2 / 3 / RATE
    assert cost.communication(message).seconds == pytest.approx(expected, rel=0.02)
    # What the operators of the tiny job do not explain is the host's.
    overhead = found.overhead
    assert overhead.probe_seconds == 0.005
    assert overhead.step_seconds > 0 or overhead.launch_seconds > 0
    assert all(math.isfinite(value) for value in (overhead.collective_seconds, found.peak("bf16")))
