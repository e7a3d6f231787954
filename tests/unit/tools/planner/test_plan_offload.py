"""CPU offload of a GPU's job: traced whole, composed, and timed by hand."""

from dataclasses import replace
from typing import Any

import pytest

from titanlite.config import JobConfig, ResolvedJob, resolve_job
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.tools.planner.compose import compose, peaks
from titanlite.tools.planner.composition import ModelPart
from titanlite.tools.planner.cost import ON_HOST, Cost
from titanlite.tools.planner.events import (
    HOST_LINK,
    TO_DEVICE,
    TO_HOST,
    Communication,
    Event,
    Operator,
    Site,
    Trace,
    Wait,
)
from titanlite.tools.planner.hardware import Curve, Host, Overhead, load_hardware
from titanlite.tools.planner.pieces import trace_pieces
from titanlite.tools.planner.planning import plan_job
from titanlite.tools.planner.predict import predict
from titanlite.tools.planner.timing import time_events
from titanlite.tools.planner.trace import trace_rank

SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
TP, PP = "tensor_parallel_degree", "pipeline_parallel_degree"
BF16 = {"mixed_precision_param": "bfloat16"}
FSDP2 = {SHARD: 2}
# Parallelism and [training] of each plan.
QUICK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp2 x tp2, bfloat16": ({**FSDP2, TP: 2}, BF16),
    "pp2 x fsdp2": ({**FSDP2, PP: 2}, {}),
}
SLOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (FSDP2, {}),
    "fsdp2, two batches": (FSDP2, {"global_batch_size": 8}),
    "one rank, bfloat16": ({}, BF16),
    "hsdp2x2": ({**FSDP2, REPLICATE: 2}, {}),
    "hsdp2x2, two batches": ({**FSDP2, REPLICATE: 2}, {"global_batch_size": 16}),
    "pp2 x fsdp2, bfloat16": ({**FSDP2, PP: 2}, BF16),
    "not pinned": (FSDP2, {"cpu_offload_pin_memory": False}),
}


FLOAT8 = {"vocab_size": 32, "converters": ["quantize.linear.float8"]}
GATHERS = {"quantize": {"linear": {"float8": {"enable_fsdp_float8_all_gather": True}}}}


def job(
    parallelism: dict[str, Any],
    training: dict[str, Any],
    device: str = "cuda",
    model: dict[str, Any] | None = None,
) -> ResolvedJob:
    degrees = {SHARD: 1, **parallelism}
    local = 4 if PP in degrees else 2
    shards = degrees[SHARD] * degrees.get(REPLICATE, 1)
    batch = {"dataset": "synthetic", "local_batch_size": local, "global_batch_size": local * shards}
    config = JobConfig.from_dict(
        {
            "job": {"device": device},
            "model": {"flavor": "debug", "num_layers": 4, **(model or {})},
            **(GATHERS if model else {}),
            "training": {**batch, "enable_cpu_offload": True, **training},
            "parallelism": degrees,
            "activation_checkpoint": {"mode": "none"},
        }
    )
    return resolve_job(config, None)


def check(plan: ResolvedJob) -> None:
    """A composed plan is the traced one: communication, copies, and what each memory holds."""
    composed = compose(plan, trace_pieces(plan))
    for one in {0: composed[0], len(composed) - 1: composed[-1]}.values():
        trace = trace_rank(plan, one.rank)
        assert one.totals() == trace.totals()
        assert one.held_on_host == trace.held_on_host
        for category in ("parameters", "optimizer state"):
            assert one.held[category] == trace.held[category]
        host = trace.host_peak()
        assert one.host_peak().bytes_of["gradients"] == host.bytes_of["gradients"]
        assert one.host_peak().num_bytes == pytest.approx(host.num_bytes, rel=0.01)
        assert one.peak().num_bytes == pytest.approx(trace.peak().num_bytes, rel=0.06)
        # FSDP2's streams take more than the peak, in the trace too.
        assert one.reserved() == pytest.approx(trace.reserved(is_exact=True), rel=0.15)
        assert min(one.reserved(), trace.reserved()) > max(one.peak().num_bytes, 1)
    own = [(one.reserved(), one.host_peak().num_bytes) for one in composed]
    assert peaks(composed) == (max(first for first, _ in own), max(second for _, second in own))


@pytest.mark.parametrize("plan", QUICK)
def test_a_composed_plan_with_offload_equals_the_traced_one(plan: str) -> None:
    check(job(*QUICK[plan]))


@pytest.mark.slow
@pytest.mark.parametrize("plan", SLOW)
def test_all_composed_plans_with_offload_equal_the_traced_ones(plan: str) -> None:
    check(job(*SLOW[plan]))


@pytest.mark.slow
def test_float8_shards_are_copied_before_they_are_cast() -> None:
    plan = job(FSDP2, BF16, model=FLOAT8)
    trace = trace_rank(plan, 0)
    copies = [one for one in trace.communications if one.axis == HOST_LINK]
    gathers = [one for one in trace.communications if one.kind == "all_gather"]
    copied = sum(one.num_bytes for one in copies if one.kind == TO_DEVICE)
    # Copies are of float32 shards; most of what is gathered is in float8.
    assert 2 * copied > 3 * sum(one.num_bytes for one in gathers) / FSDP2[SHARD]
    check(plan)


@pytest.fixture(scope="module")
def traced() -> Trace:
    return trace_rank(job(FSDP2, {"global_batch_size": 8}), 0)


def test_the_update_is_on_the_host(traced: Trace) -> None:
    update = {e.name for e in traced.operators if e.is_on_host and e.place.phase == "optimizer"}
    assert {"aten::_foreach_norm", "aten::_foreach_mul_", "aten::_fused_adamw_"} <= update
    assert not any(e.is_on_host and e.flops for e in traced.operators)


def test_on_the_cpu_nothing_is_copied() -> None:
    trace = trace_rank(job(FSDP2, {}, device="cpu"), 0)
    assert not [one for one in trace.communications if one.axis == HOST_LINK]
    assert trace.host_peak().num_bytes == 0
    assert trace.held["optimizer state"] > 0


# Time, on hardware with round figures: 100 MB/s between host and device, 50 MB/s on the host

ONE = Curve(((1.0, 1.0),))
H100 = load_hardware("h100")
FREE = 1e30
ROUND = replace(
    H100,
    flops_per_second={"float32": 1e12},
    memory=replace(H100.memory, bytes_per_second=FREE, share=ONE),
    node=replace(H100.node, bytes_per_second=1e8, latency_seconds=0.0, share=ONE),
    products=replace(H100.products, share=1.0, tile_m=1.0, tile_n=1.0, num_units=1.0, half_k=0.0),
    overhead=Overhead(launch_seconds=0.0, kernel_seconds=0.0, collective_seconds=0.0),
    host=Host(1e9, 1e8, 0.0, 1e8, 0.5),
)
FORWARD, UPDATE = Site("layers.0", "forward"), Site("", "optimizer")


def copy(number: int, kind: str, megabytes: int, *after: int) -> Communication:
    size = 10**6 * megabytes
    return Communication(kind, HOST_LINK, size, 1, FORWARD, number, after=after)


def product(milliseconds: int) -> Operator:
    shape = (1, 1000 * milliseconds, 1000, 500)
    return Operator("aten::mm", 10**9 * milliseconds, 0, 0, FORWARD, "float32", shape)


def time_of(events: list[Event]) -> tuple[float, dict[str, float], dict[str, float]]:
    """Seconds; those of work by kind; those that communication is exposed for, by kind."""
    found = time_events(events, Cost(ROUND, ParallelDims(dp_shard=2)))
    exposed = {one.kind: one.exposed_seconds for one in found.traffic}
    return found.seconds, found.compute_seconds, exposed


def test_a_copy_is_hidden_behind_work_or_exposed() -> None:
    # 10 MB take 100 ms.
    seconds, _, exposed = time_of([copy(1, TO_DEVICE, 10), product(150), Wait(1)])
    assert (seconds, exposed[TO_DEVICE]) == (pytest.approx(0.15), 0)
    seconds, _, exposed = time_of([copy(1, TO_DEVICE, 10), product(30), Wait(1)])
    assert (seconds, exposed[TO_DEVICE]) == (pytest.approx(0.1), pytest.approx(0.07))


def test_a_gather_starts_when_its_copy_has_ended() -> None:
    # Half of 8 MB is sent, in 40 ms.
    gather = Communication("all_gather", "dp_shard", 8 * 10**6, 2, FORWARD, 2, after=(1,))
    events = [copy(1, TO_DEVICE, 10), gather, product(50), Wait(1), Wait(2), product(10)]
    seconds, _, exposed = time_of(events)
    assert seconds == pytest.approx(0.15)
    assert exposed == {TO_DEVICE: pytest.approx(0.05), "all_gather": pytest.approx(0.04)}


def test_copies_in_both_directions_run_at_once() -> None:
    both = [copy(1, TO_DEVICE, 10), copy(2, TO_HOST, 10), Wait(1), Wait(2)]
    assert time_of(both)[0] == pytest.approx(0.1)
    again = [copy(1, TO_DEVICE, 10), copy(2, TO_DEVICE, 10, 1), Wait(2)]
    assert time_of(again)[0] == pytest.approx(0.2)


def test_the_update_takes_the_hosts_bandwidth() -> None:
    # The moments are written, too: 4 + 3 MB.
    update = Operator("aten::_fused_adamw_", 0, 4 * 10**6, 10**6, UPDATE, "float32")
    on_host = replace(update, is_on_host=True)
    assert time_of([on_host])[:2] == (pytest.approx(0.14), {ON_HOST: pytest.approx(0.14)})
    assert time_of([update])[0] < 1e-9


def test_a_step_that_only_copies_takes_as_long_as_its_copies() -> None:
    """All else is free.

    The forward pass copies all units to the device, one after another, and the backward pass all
    but the last block and the head again. A block is reduced after the gather of the block before,
    which waits for its copy: so the gradients of the four blocks follow one block behind the copies
    of the first three, and those of the embeddings come after them.
    """
    hardware = replace(
        ROUND,
        flops_per_second={"float32": FREE},
        node=replace(ROUND.node, bytes_per_second=FREE),
        host=replace(ROUND.host, memory_bytes_per_second=FREE),
    )
    resolved = job(FSDP2, {})
    pieces = trace_pieces(resolved)
    whole = predict(resolved, compose(resolved, pieces), Cost(hardware, resolved.dims), pieces)

    def shards(part: ModelPart) -> int:
        return sum(one.shard_numel(2) * one.itemsize for one in part.weights)

    (block,) = map(shards, pieces.blocks)
    first, head = shards(pieces.before), shards(pieces.after)
    assert first < block
    forward = first + 4 * block + head
    assert whole.step.seconds == pytest.approx((forward + (1 + 4) * block + first) / 1e8)
    (rank,) = whole.step.ranks.values()
    exposed = rank.axes[HOST_LINK].exposed_seconds
    assert exposed == pytest.approx(whole.step.seconds)
    assert "CPU offload's copies to the device of the forward pass are exposed" in whole.step.bound


def test_a_gpu_without_figures_of_its_host_is_refused() -> None:
    alone = replace(H100, host=None)
    with pytest.raises(ConfigError, match=r"has no \[host\], which training.enable_cpu_offload"):
        plan_job(job(FSDP2, {}), alone)
    cost = Cost(alone, ParallelDims(dp_shard=2))
    with pytest.raises(ConfigError, match=r"has no \[host\]"):
        time_events([copy(1, TO_DEVICE, 1), Wait(1)], cost)
