"""CPU offload of a GPU's job: composed, and timed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from titanlite.config import ResolvedJob, make_config, resolve_job
from titanlite.config.load import override
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
Plan = tuple[dict[str, Any], dict[str, Any], list[tuple[int, int]]]
# Parallelism and [training] of each plan; and the peaks of the device and of the host on the first
# and the last stage, where FSDP2's own copies were traced.
QUICK: dict[str, Plan] = {
    "fsdp2 x tp2, bfloat16": ({**FSDP2, TP: 2}, BF16, [(560684, 178592)]),
    "pp2 x fsdp2": ({**FSDP2, PP: 2}, {}, [(865616, 174432), (562708, 170048)]),
}
SLOW: dict[str, Plan] = {
    "fsdp2": (FSDP2, {}, [(1380332, 344480)]),
    "fsdp2, two batches": (FSDP2, {"global_batch_size": 8}, [(1383936, 348072)]),
    "one rank, bfloat16": ({}, BF16, [(988204, 686752)]),
    "hsdp2x2": ({**FSDP2, REPLICATE: 2}, {}, [(1381548, 344480)]),
    "hsdp2x2, two batches": (
        {**FSDP2, REPLICATE: 2},
        {"global_batch_size": 16},
        [(1469888, 344480)],
    ),
    "pp2 x fsdp2, bfloat16": ({**FSDP2, PP: 2}, BF16, [(651920, 174432), (458516, 170048)]),
    "not pinned": (FSDP2, {"cpu_offload_pin_memory": False}, [(1380332, 344480)]),
}


FLOAT8 = {
    "vocab_size": 32,
    "converters": ["quantize.linear.float8"],
}
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
    config = make_config(
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


def check(parallelism: dict[str, Any], training: dict[str, Any], traced: Any) -> None:
    """A composed plan has the peaks that were traced; the rest is that of the job without offload.

    What that holds of parameters and optimizer state is on the host, and its shards are copied.
    """
    plan = job(parallelism, training)
    alone = resolve_job(override(plan.config, {"training.enable_cpu_offload": False}))
    composed = compose(plan, trace_pieces(plan))
    ends = [composed[0], composed[-1]][: len(traced)]
    for one, (device, host) in zip(ends, traced, strict=True):
        trace = trace_rank(alone, one.rank)
        totals = one.totals()
        (_, to_device), (_, to_host) = (totals.pop((to, HOST_LINK)) for to in (TO_DEVICE, TO_HOST))
        assert totals == trace.totals()
        parameters = one.held_on_host["parameters"]
        assert one.held["parameters"] == trace.held["parameters"] - parameters
        assert one.held_on_host["optimizer state"] == trace.held["optimizer state"]
        assert one.host_peak().bytes_of["gradients"] == parameters
        # In the last batch of replicas, or in each batch, all gradients are copied.
        assert to_host % parameters == 0
        assert to_device >= to_host
        assert one.host_peak().num_bytes == pytest.approx(host, rel=0.01)
        assert one.peak().num_bytes == pytest.approx(device, rel=0.06)
    own = [(one.peak().num_bytes, one.host_peak().num_bytes) for one in composed]
    assert peaks(composed) == (max(first for first, _ in own), max(second for _, second in own))


@pytest.mark.parametrize("plan", QUICK)
def test_a_composed_plan_with_offload_equals_what_was_traced(plan: str) -> None:
    check(*QUICK[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", SLOW)
def test_all_composed_plans_with_offload_equal_what_was_traced(plan: str) -> None:
    check(*SLOW[plan])


def test_float8_shards_are_copied_before_they_are_cast() -> None:
    plan = job(FSDP2, BF16, model=FLOAT8)
    (composed,) = compose(plan, trace_pieces(plan))
    totals = composed.totals()
    # Copies are of float32 shards; most of what is gathered is in float8.
    copied, gathered = totals[TO_DEVICE, HOST_LINK][1], totals["all_gather", "dp_shard"][1]
    assert 2 * copied > 3 * gathered / FSDP2[SHARD]


def test_the_update_is_on_the_host() -> None:
    plan = job(FSDP2, {})
    (composed,) = compose(plan, trace_pieces(plan))
    update = [e for e in composed.actions[-1].segment.events if isinstance(e, Operator)]
    names = {one.name for one in update if one.is_on_host}
    assert {"aten::_foreach_norm", "aten::_foreach_mul_", "aten::_fused_adamw_"} <= names
    assert not any(one.is_on_host and one.flops for one in update)


def test_a_cpu_job_copies_nothing() -> None:
    plan = plan_job(job(FSDP2, {}, device="cpu"))
    assert plan.host_bytes == 0
    assert not [axis for _, axis in plan.ranks[0].totals if axis == HOST_LINK]
    assert plan.ranks[0].held["optimizer state"] > 0


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
