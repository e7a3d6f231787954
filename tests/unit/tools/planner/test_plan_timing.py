"""From events to time: figures worked out by hand, on hardware with round figures."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.tools.planner.cost import FABRIC, NODE, Cost, computed_flops, product_efficiency
from titanlite.tools.planner.events import Allocation, Communication, Event, Operator, Site, Wait
from titanlite.tools.planner.fuse import fuse
from titanlite.tools.planner.hardware import (
    CollectiveCost,
    Curve,
    Hardware,
    Interconnect,
    OperatorCost,
    Software,
    load_hardware,
)
from titanlite.tools.planner.timing import started_ahead, step_time, time_events

ONE = Curve(((1.0, 1.0),))
A100 = load_hardware("a100")
# 1 TFLOP/s, 1 GB/s of memory, 100 MB/s in a node, 10 MB/s between nodes; no overheads.
ROUND = Hardware(
    name="round",
    kind="gpu",
    flops_per_second={"float32": 1e12},
    memory=replace(A100.memory, bytes_per_second=1e9, share=ONE),
    node=replace(A100.node, num_ranks=8, bytes_per_second=1e8, latency_seconds=0.0, share=ONE),
    fabric=Interconnect(1e7, 0.0, ONE),
    products=replace(A100.products, share=1.0, tile_m=1.0, tile_n=1.0, num_units=1.0, half_k=0.0),
    attention=replace(A100.attention, forward_share=0.5, backward_share=0.25),
    overhead=replace(A100.overhead, launch_seconds=0.0, kernel_seconds=0.0, collective_seconds=0.0),
)
FORWARD = Site("layers.0", "forward")
BACKWARD = Site("layers.0", "backward")


def product(gigaflops: int, place: Site = FORWARD) -> Operator:
    side = 1000 * gigaflops
    return Operator("aten::mm", 10**9 * gigaflops, 0, 0, place, "float32", (1, side, 1000, 500))


def elementwise(read: int, written: int, name: str = "aten::mul", **others: object) -> Operator:
    values = {"place": FORWARD, "dtype": "float32", **others}
    return Operator(name, 0, read, written, **values)  # type: ignore[arg-type]


def gather(
    number: int, megabytes: int, axis: str = "tp", num_ranks: int = 2, place: Site = FORWARD
) -> Communication:
    return Communication("all_gather", axis, 10**6 * megabytes, num_ranks, place, number)


TP2 = Cost(ROUND, ParallelDims(tp=2))


def on_software(**keys: Any) -> Cost:
    return Cost(replace(ROUND, software=Software(**keys)), TP2.dims, head_dim=100)


def test_operators_are_bound_by_operations_or_by_memory() -> None:
    assert TP2.operator(product(2)) == pytest.approx(2e-3)
    assert TP2.operator(replace(product(2), bytes_read=10**7)) == pytest.approx(1e-2)
    assert TP2.operator(elementwise(10**6, 10**6)) == pytest.approx(2e-3)
    # Free: no data are moved.
    assert TP2.operator(elementwise(10**6, 10**6, "aten::_unsafe_view")) == 0
    assert TP2.operator(elementwise(10**6, 10**6, "prim::device")) == 0
    # Both moments are written beside the parameter.
    assert TP2.operator(elementwise(4 * 10**6, 10**6, "aten::_fused_adamw_")) == pytest.approx(7e-3)
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    whole = Operator(flash, 10**9, 0, 0, FORWARD, "float32")
    assert TP2.operator(whole) == pytest.approx(2e-3)
    # A causal kernel computes half of it and the diagonal, at half of the peak.
    forward = replace(whole, causal=(999, 999))
    assert TP2.operator(forward) == pytest.approx(1e-3 * 1000 / 999)
    forward = replace(whole, flops=10**9 // 2)
    backward = replace(forward, name=f"{flash}_backward")
    assert TP2.operator(backward) == pytest.approx(2e-3)
    forward, backward = whole, replace(whole, name=f"{flash}_backward")
    unfused = on_software(attention="unfused")
    # 2.5 million scores, each written and read three times, with a mask of a byte.
    scores = 10**9 / 400
    assert unfused.operator(forward) == pytest.approx(1e-3 + scores * 25 / 1e9)
    # One million scores: four products of 200 operations each, and eight reads and writes.
    assert unfused.operator(backward) == pytest.approx(4 * 200 * 1e6 / 1e12 + 1e6 * 33 / 1e9)
    again = on_software(attention="unfused, recomputed")
    assert again.operator(backward) - unfused.operator(backward) == pytest.approx(
        unfused.operator(replace(forward, flops=4 * 10**8)), rel=1e-6
    )


@pytest.mark.parametrize(
    ("length", "share"),
    [
        # One block of keys; then two and three, of which early queries skip the later ones.
        (512, 1.0),
        (1024, (2 * 512 + 2 * 1024) / 4096),
        (1536, (2 * 512 + 2 * 1024 + 2 * 1536) / (6 * 1536)),
    ],
)
def test_the_cpu_computes_whole_blocks_of_causal_attention(length: int, share: float) -> None:
    one = Operator("aten::attention", 10**9, 0, 0, FORWARD, "float32", causal=(length, length))
    assert computed_flops(one, "cpu") == pytest.approx(share * 10**9)
    assert computed_flops(replace(one, causal=()), "cpu") == 10**9


def test_products_lose_by_their_shape() -> None:
    of = replace(A100.products, half_k=0.0)
    hardware = replace(A100, products=of)
    wave = (1, 108 * of.tile_m, of.tile_n, 4096)
    assert product_efficiency(hardware, *map(int, wave)) == pytest.approx(1)
    # One tile more needs a second wave.
    more = product_efficiency(hardware, 1, int(109 * of.tile_m), int(of.tile_n), 4096)
    assert 0.5 < more < 0.8
    assert product_efficiency(hardware, 1, 128, 128, 4096) < 0.02
    short = replace(A100, products=replace(of, half_k=64.0))
    assert product_efficiency(short, 1, 27648, 128, 64) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kind", "expected"), [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_reduce", 1.5)]
)
def test_collectives_send_their_share_over_the_link_that_limits_them(
    kind: str, expected: float
) -> None:
    dims = ParallelDims(dp_shard=4, tp=4)
    cost = Cost(ROUND, dims)
    inside = cost.communication(Communication(kind, "tp", 10**8, 4, FORWARD, 1))
    assert inside == (0.0, pytest.approx(expected), NODE)
    # dp_shard has two of its four ranks in each of two nodes of eight.
    assert cost.geometry("dp_shard", 4).per_node == 2
    assert cost.geometry("dp_shard", 4).num_nodes == 2
    between = cost.communication(Communication(kind, "dp_shard", 10**8, 4, FORWARD, 1))
    # Two ports of a tenth of the rate.
    assert between == (0.0, pytest.approx(5 * expected), FABRIC)


def test_axes_lie_on_nodes_from_the_innermost_outward() -> None:
    cost = Cost(ROUND, ParallelDims(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=4))
    assert cost.geometry("tp", 4).num_nodes == 1
    assert cost.geometry("cp", 2).num_nodes == 1
    assert cost.geometry("dp_shard", 4) == (cost.geometry("dp_shard", 4))
    assert cost.geometry("dp_shard", 4).num_nodes == 4
    # Flattened, dp_shard and cp have two ranks in each node.
    assert cost.geometry("dp_shard_cp", 8).per_node == 2
    assert cost.geometry("world", 128).per_node == 8
    send = Communication("send", "pp", 10**7, 2, FORWARD, 1, peer=1)
    assert cost.communication(send, rank=0).link == FABRIC
    near = Cost(ROUND, ParallelDims(pp=2, tp=4))
    assert near.communication(send, rank=0) == (0.0, pytest.approx(0.1), NODE)
    assert cost.communication(replace(send, num_ranks=1)).seconds == 0


def test_latency_grows_with_the_ring_but_not_that_of_a_tree() -> None:
    slow = replace(ROUND, fabric=Interconnect(1e7, 1.0, ONE))
    cost = Cost(slow, ParallelDims(dp_shard=1024))
    gathered = cost.communication(Communication("all_gather", "dp_shard", 0, 1024, FORWARD, 1))
    reduced = cost.communication(Communication("all_reduce", "dp_shard", 0, 1024, FORWARD, 1))
    assert gathered.latency_seconds == 128
    assert reduced.latency_seconds == pytest.approx(2 * 7)


def test_waited_communication_is_hidden_and_other_is_exposed() -> None:
    events: list[Event] = [
        gather(1, 2),
        product(4),
        Allocation(1, 5, FORWARD),
        Wait(1),
        gather(2, 2, place=BACKWARD),
        product(1, BACKWARD),
    ]
    found = time_events(events, TP2)
    assert found.seconds == pytest.approx(0.01 + 0.01 + 0.001)
    assert found.compute_seconds == {"products": pytest.approx(5e-3)}
    by_phase = {one.phase: one for one in found.traffic}
    assert by_phase["forward"].exposed_seconds == pytest.approx(6e-3)
    assert by_phase["forward"].hidden_seconds == pytest.approx(4e-3)
    assert by_phase["backward"].hidden_seconds == pytest.approx(0)
    axis = found.axes["tp"]
    assert axis.num_bytes == 4 * 10**6
    assert axis.exposed_seconds == pytest.approx(16e-3)
    assert found.flops == 5 * 10**9
    # A repeated segment has the same numbers again.
    assert time_events(events * 3, TP2).seconds == pytest.approx(3 * found.seconds)
    assert time_events([], TP2).seconds == 0


def test_axes_that_share_a_link_slow_each_other() -> None:
    cost = Cost(ROUND, ParallelDims(dp_shard=2, tp=2))
    both: list[Event] = [gather(1, 2), gather(2, 2, "dp_shard"), Wait(1), Wait(2)]
    assert time_events(both, cost).seconds == pytest.approx(0.02)
    # dp_shard goes between nodes: another link.
    apart = Cost(replace(ROUND, node=replace(ROUND.node, num_ranks=2)), cost.dims)
    assert time_events(both, apart).seconds == pytest.approx(0.1)


def test_a_step_is_that_of_all_its_stages() -> None:
    def message(kind: str, peer: int, number: int) -> list[Event]:
        one = Communication(kind, "pp", 10**6, 2, FORWARD, number, peer)
        return [one, Wait(number)] if kind == "receive" else [one]

    first = [product(10), *message("send", 1, 1), *message("receive", 1, 2), product(5)]
    last = [*message("receive", 0, 1), product(10), *message("send", 0, 2)]
    cost = Cost(ROUND, ParallelDims(pp=2))
    found = {rank: time_events(events, cost, rank) for rank, events in enumerate((first, last))}
    assert found[0].seconds == pytest.approx(0.01 + 0.01 + 0.01 + 0.005)
    assert found[1].seconds == pytest.approx(0.01 + 0.01 + 0.01)
    # Nothing waits for a send later, so it holds the stream, too.
    assert found[0].axes["pp"].exposed_seconds == pytest.approx(0.02)
    # The first waits while the last computes, and the last while the first does.
    waiting = {0: 0.01, 1: 0.015}
    found = {
        rank: replace(one, seconds=0.045, idle_seconds=waiting[rank]) for rank, one in found.items()
    }
    step = step_time(found, cost, tokens=100, model_flops=20e9, dtype="float32")
    assert step.tokens_per_second == pytest.approx(50 / 0.045)
    assert step.mfu == pytest.approx(20e9 / 2e12 / 0.045)
    assert step.hfu == pytest.approx(12.5e9 / 1e12 / 0.045)
    assert step.bound.startswith("matrix products take 33% of the step")
    assert "idle for" in step.bound
    assert json.loads(json.dumps(asdict(step)))["seconds"] == step.seconds


def test_the_sentence_names_what_is_exposed() -> None:
    found = time_events([product(5), gather(1, 2, place=BACKWARD)], TP2)
    step = step_time({0: found}, TP2, tokens=1, model_flops=1.0, dtype="float32")
    assert step.bound == (
        "TP all-gathers of the backward pass are exposed for 67% of the step; matrix products take "
        "33%"
    )


def test_fused_chains_keep_what_only_they_use_on_the_chip() -> None:
    def chain(*pairs: tuple[int, int]) -> list[Event]:
        return [elementwise(read, written) for read, written in pairs]

    joined = fuse(chain((8, 8), (8, 8), (16, 8)))
    assert len(joined) == 1
    assert isinstance(joined[0], Operator)
    # 8 read first, and 8 of the last 16; only the last result is written.
    assert (joined[0].bytes_read, joined[0].bytes_written) == (16, 8)
    kept = fuse([*chain((8, 8)), product(1), *chain((8, 8))])
    assert [type(event).__name__ for event in kept] == ["Operator"] * 3
    other = elementwise(8, 8, place=Site("layers.1.norm", "forward"))
    assert len(fuse([*chain((8, 8)), other])) == 2
    memory = Allocation(1, 8, FORWARD)
    assert memory in fuse([*chain((8, 8)), memory, *chain((8, 8))])
    assert fuse([elementwise(8, 8, "prim::device")]) == []
    unfused = time_events(chain((8, 8), (8, 8)), TP2).seconds
    assert time_events(chain((8, 8), (8, 8)), replace(TP2, is_compiled=True)).seconds < unfused


def test_a_gpu_starts_communication_when_it_is_ready() -> None:
    def unit(number: int) -> list[Event]:
        # Five events; the all-gather can start when the unit before has been copied out.
        ready = 5 * (number - 1) - 1 if number > 1 else -1
        copy_in = elementwise(0, 0, "fsdp::all_gather_copy_in", is_beside=ready >= 0)
        copy_out = elementwise(0, 0, "fsdp::split_with_sizes_copy")
        one = replace(gather(number, 2, "dp_shard"), ready=ready)
        return [copy_in, one, Wait(number), copy_out, product(10)]

    events = [*unit(1), *unit(2), *unit(3)]
    moved = started_ahead(events)
    assert sorted(map(repr, moved)) == sorted(map(repr, events))
    # The copy out, the next unit's copy in and gather, and only then the product.
    assert moved[3:7] == [events[3], events[5], events[6], events[4]]
    cost = Cost(ROUND, ParallelDims(dp_shard=2))
    found = time_events(events, cost)
    # The first is exposed; each other one takes as long as the products before it.
    assert found.seconds == pytest.approx(4 * 0.01)
    cpu = Cost(replace(ROUND, kind="cpu"), cost.dims)
    assert time_events(events, cpu).seconds == pytest.approx(6 * 0.01)
    # Positions count memory, which takes no time.
    with_memory = [Allocation(1, 8, FORWARD), *(replace_ready(event, 1) for event in events)]
    assert started_ahead(with_memory) == [replace_ready(event, 1) for event in moved]


def replace_ready(event: Event, by: int) -> Event:
    if isinstance(event, Communication) and event.ready >= 0:
        return replace(event, ready=event.ready + by)
    return event


def test_measured_costs_replace_formulas() -> None:
    overhead = replace(
        ROUND.overhead,
        launch_seconds=1.0,
        collective_seconds=0.5,
        recomputed_seconds=0.5,
        unshard_seconds=0.25,
        message_seconds=0.125,
    )
    hardware = replace(
        ROUND,
        kind="cpu",
        overhead=overhead,
        operators={
            "aten::mul:float32": OperatorCost(2.0, 10.0, 100.0),
            "aten::add:float32:strided": OperatorCost(7.0),
        },
        collectives={"all_gather": CollectiveCost(3.0, 0.5, 10.0)},
    )
    cost = Cost(hardware, ParallelDims(pp=2, dp_shard=3, tp=3))
    assert cost.operator(elementwise(5, 5)) == 1.0 + 2.0 + 1.0
    assert cost.operator(replace(elementwise(5, 5), flops=100)) == 5.0
    assert cost.operator(elementwise(5, 5, "aten::add")) == pytest.approx(1.0)
    # Inputs with gaps take as long as others unless they were measured apart.
    assert cost.operator(elementwise(5, 5, "aten::add", is_strided=True)) == 1.0 + 7.0
    assert cost.operator(elementwise(5, 5, is_strided=True)) == 4.0
    again = elementwise(5, 5, place=Site("layers.0", "recomputation"))
    assert cost.operator(again) == 4.0 + 0.5
    gathered = Communication("all_gather", "tp", 30, 3, FORWARD, 1)
    found = time_events([gathered], cost)
    assert found.seconds == pytest.approx(0.5 + 3.0 + 2 * 0.5 + 2.0)
    assert found.busy_seconds == pytest.approx(found.seconds)
    assert cost.host(replace(gathered, axis="dp_shard")) == 0.25
    assert cost.host(replace(gathered, num_ranks=1)) == 0
    assert cost.host(replace(gathered, axis="dp_shard", kind="all_reduce")) == 0.5
    assert cost.host(replace(gathered, axis="pp", kind="send")) == 0.125
