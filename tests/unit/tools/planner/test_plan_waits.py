"""When the traced step waits for its communication: FSDP2, HSDP, DDP and TP, on each device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce

from titanlite.config import make_config, resolve_job
from titanlite.tools.planner.events import Communication, Event, Operator, Trace, Wait
from titanlite.tools.planner.fake_world import fake_world, stand_ins
from titanlite.tools.planner.recorder import StepRecorder
from titanlite.tools.planner.streams import Streams
from titanlite.tools.planner.trace import trace_rank

SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
LAYERS = [f"layers.{index}" for index in range(3)]


def trace(device: str, **degrees: int) -> Trace:
    config = make_config(
        {
            "job": {"device": device},
            "model": {"flavor": "debug", "num_layers": len(LAYERS)},
            "training": {"dataset": "synthetic", "global_batch_size": 8, "local_batch_size": 2},
            "parallelism": {SHARD: 1, **degrees},
            "activation_checkpoint": {"mode": "none"},
        }
    )
    return trace_rank(resolve_job(config, None), 0)


@pytest.fixture(scope="module")
def sharded() -> Trace:
    return trace("cuda", **{SHARD: 4})


def find(found: Trace, kind: str, module: str, phase: str) -> tuple[int, int]:
    """The indices of a collective of a module, and of the wait for it."""
    (issued,) = (
        (index, event.number)
        for index, event in enumerate(found.events)
        if isinstance(event, Communication)
        and (event.kind, *event.place) == (kind, module, phase)
        and event.axis != "world"
    )
    return issued[0], found.events.index(Wait(issued[1]))


def products(found: Trace, module: str, phase: str) -> tuple[int, int]:
    """The indices of the first and the last product of a block."""
    indices = [
        index
        for index, event in enumerate(found.events)
        if isinstance(event, Operator)
        and event.flops
        and (event.place.phase, event.place.module.startswith(module)) == (phase, True)
    ]
    return indices[0], indices[-1]


def communication(event: Event) -> Communication:
    assert isinstance(event, Communication)
    return event


def test_a_gather_of_the_backward_pass_is_issued_one_block_ahead(sharded: Trace) -> None:
    for block, next_block in ((2, 1), (1, 0)):
        issued, waited = find(sharded, "all_gather", LAYERS[next_block], "backward")
        first, last = products(sharded, LAYERS[block], "backward")
        own_first, _ = products(sharded, LAYERS[next_block], "backward")
        assert issued < first < last < waited < own_first


def test_a_gather_of_the_forward_pass_can_start_before_the_block_before(sharded: Trace) -> None:
    for block in (1, 2):
        issued, waited = find(sharded, "all_gather", LAYERS[block], "forward")
        first, last = products(sharded, LAYERS[block - 1], "forward")
        # The program comes there after the products, and waits at once, but the stream does not.
        assert last < issued < waited < products(sharded, LAYERS[block], "forward")[0]
        assert 0 < communication(sharded.events[issued]).ready < first


def test_a_reduction_is_waited_for_by_the_next_one_and_at_the_end(sharded: Trace) -> None:
    for block, next_block in ((2, 1), (1, 0)):
        issued, waited = find(sharded, "reduce_scatter", LAYERS[block], "backward")
        first, last = products(sharded, LAYERS[next_block], "backward")
        next_issued, _ = find(sharded, "reduce_scatter", LAYERS[next_block], "backward")
        assert issued < first < last < waited < next_issued
    issued, waited = find(sharded, "reduce_scatter", "embeddings", "backward")
    between = sharded.events[issued + 1 : waited]
    assert not [e for e in between if isinstance(e, Operator) and not e.is_beside]
    beside = [e for e in sharded.operators if e.is_beside]
    assert beside
    assert all(e.flops == 0 for e in beside)


def test_replicas_are_reduced_after_their_shards_and_waited_for_at_the_end() -> None:
    found = trace("cuda", **{SHARD: 2, REPLICATE: 2})
    _, last = products(found, LAYERS[0], "backward")
    for block in LAYERS:
        issued, waited = find(found, "all_reduce", block, "backward")
        scatter, _ = find(found, "reduce_scatter", block, "backward")
        number = communication(found.events[scatter]).number
        assert number in communication(found.events[issued]).after
        assert scatter < issued
        assert last < waited


def test_ddp_waits_at_the_end_of_the_backward_pass() -> None:
    found = trace("cpu", **{REPLICATE: 4})
    (reduction,) = (one for one in found.communications if one.axis == "dp_replicate")
    _, last = products(found, LAYERS[0], "backward")
    waited = found.events.index(Wait(reduction.number))
    assert last < found.events.index(reduction) < waited
    after = next(event for event in found.events[waited:] if isinstance(event, Operator))
    assert after.place.phase == "backward"


def test_on_the_cpu_collectives_of_fsdp_are_waited_for_at_once() -> None:
    found = trace("cpu", **{SHARD: 2, REPLICATE: 2})
    for index, event in enumerate(found.events):
        if isinstance(event, Communication):
            waited = found.events.index(Wait(event.number))
            between = found.events[index + 1 : waited]
            assert not [e for e in between if isinstance(e, Operator | Communication)]
            assert (event.ready, event.after) == (-1, ())
    assert not [e for e in found.operators if e.is_beside]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_functional_collective_is_waited_for_when_a_run_does(is_compiled: bool) -> None:
    """Eager code waits at the first use of the result, and a compiled graph at once."""

    def compute(x: Tensor) -> Tensor:
        reduced = all_reduce(x, "sum", dist.group.WORLD)
        other = x.exp()
        return reduced.view(2, 4).mul(other.view(2, 4))

    with fake_world(0, 4), stand_ins():
        function = torch.compile(compute) if is_compiled else compute
        recorder = StepRecorder({})
        with FakeTensorMode(), recorder.watching([]):
            x = torch.ones(8)
            recorder.events.clear()
            function(x)
    found = [
        event.name if isinstance(event, Operator) else type(event).__name__
        for event in recorder.events
        if isinstance(event, Operator | Communication | Wait)
    ]
    issued, waited, used = "Communication", "Wait", ["aten::exp", "aten::mul"]
    between = [issued, waited, *used] if is_compiled else [issued, used[0], waited, used[1]]
    assert found == between


def test_streams_wait_for_what_they_were_told() -> None:
    device: Any = torch.cpu
    waits: list[int] = []
    position = 0
    streams = Streams(lambda: position, waits.extend)
    with streams.in_place_of(device):
        one, other = device.Stream(priority=-1), device.Stream()
        with device.stream(one):
            assert streams.is_beside
            assert streams.issue(1).numbers == ()
            assert streams.issue(2).numbers == (1,)
            done = one.record_event()
            assert streams.issue(3).numbers == (1, 2)
        assert not streams.is_beside
        position = 7
        other.wait_stream(device.current_stream())
        other.wait_event(done)
        assert not waits
        with device.stream(other):
            before = streams.issue(4)
            assert (before.numbers, before.position) == ((1, 2), 7)
        device.current_stream().wait_event(done)
        assert waits == [1, 2]
        mark = device.Event()
        mark.record(other)
        mark.synchronize()
        assert waits == [1, 2, 4]
        streams.restart()
        assert streams.state_of(one).numbers == ()
