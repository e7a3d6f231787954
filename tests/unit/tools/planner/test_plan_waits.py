"""When the traced step waits for its communication: HSDP, DDP and TP, as a run on the CPU does."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce

from titanlite.config import JobConfig, resolve_job
from titanlite.tools.planner.events import Communication, Operator, Trace, Wait
from titanlite.tools.planner.fake_world import fake_world, stand_ins
from titanlite.tools.planner.recorder import StepRecorder
from titanlite.tools.planner.trace import trace_rank

SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"


def trace(**degrees: int) -> Trace:
    config = JobConfig.from_dict(
        {
            "model": {"flavor": "debug", "num_layers": 3},
            "training": {"dataset": "synthetic", "global_batch_size": 8, "local_batch_size": 2},
            "parallelism": {SHARD: 1, **degrees},
            "activation_checkpoint": {"mode": "none"},
        }
    )
    return trace_rank(resolve_job(config, None), 0)


def test_ddp_waits_at_the_end_of_the_backward_pass() -> None:
    found = trace(**{REPLICATE: 4})
    (reduction,) = (one for one in found.communications if one.axis == "dp_replicate")
    last = max(at for at, e in enumerate(found.events) if isinstance(e, Operator) and e.flops)
    waited = found.events.index(Wait(reduction.number))
    assert last < found.events.index(reduction) < waited
    after = next(event for event in found.events[waited:] if isinstance(event, Operator))
    assert after.place.phase == "backward"


def test_on_the_cpu_collectives_of_fsdp_are_waited_for_at_once() -> None:
    found = trace(**{SHARD: 2, REPLICATE: 2})
    for index, event in enumerate(found.events):
        if isinstance(event, Communication):
            waited = found.events.index(Wait(event.number))
            between = found.events[index + 1 : waited]
            assert not [e for e in between if isinstance(e, Operator | Communication)]


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
