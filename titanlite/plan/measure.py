"""CPU-seconds of steps, operators and collectives, measured on local ranks.

Each function runs on the ranks that `run_ranks` starts, with one thread on each. CPU-seconds are
measured, since wall time on shared cores is noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from titanlite.config import JobConfig, resolve_job
from titanlite.plan.events import Operator
from titanlite.ranks.launch import ALONE, Place

Sample = tuple[Operator, float]
"""An operator, and the CPU-seconds of a call."""
Transfers = list[tuple[str, int, int, float]]
"""Kind, bytes of the whole tensor, ranks, and CPU-seconds of a rank."""

WARM_UP = 2
"""Steps that are not measured: optimizer state and buffers are allocated in the first."""
NUM_RECORDED = 4
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
SIZES = (1 << 12, 1 << 18, 1 << 22)
REPETITIONS = {1 << 12: 20, 1 << 18: 10, 1 << 22: 3}


def time_steps(place: Place, configs: Sequence[JobConfig], num_steps: int) -> list[list[float]]:
    """The CPU-seconds of each step of each job on this rank."""
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    found = []
    with open_world(place) as world:
        torch.set_num_threads(1)
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            seconds = []
            for _ in range(WARM_UP + num_steps):
                start = time.process_time()
                job.step()
                seconds.append(time.process_time() - start)
            found.append(seconds[WARM_UP:])
    return found


def time_operators(
    place: Place | None, configs: Sequence[JobConfig], products: Sequence[tuple[int, int, int]] = ()
) -> list[Sample]:
    """The operators of a step of each job, and of products of (m, n, k), with their CPU-seconds.

    Without a place, each rank runs the jobs alone.
    """
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    found: list[Sample] = []
    with open_world(place or ALONE) as world:
        torch.set_num_threads(1)
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            job.step()
            found += _medians([_record(job.step) for _ in range(NUM_RECORDED)])
        for kind in (torch.float32, torch.bfloat16):
            for m, n, k in products:
                a, b = torch.randn(m, k, dtype=kind), torch.randn(k, n, dtype=kind)
                found += _medians([_record(partial(torch.mm, a, b)) for _ in range(NUM_RECORDED)])
    return found


def time_operators_alone(
    _: Place, configs: Sequence[JobConfig], products: Sequence[tuple[int, int, int]]
) -> list[Sample]:
    """time_operators of jobs of one rank, on each of several ranks at a time."""
    return time_operators(None, configs, products)


def time_collectives(place: Place) -> Transfers:
    """The CPU-seconds of this rank for each collective, by bytes."""
    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        return _time_collectives(world.rank, world.size)


def _record(function: Callable[[], object]) -> list[Sample]:
    """Call a function; the operators that it ran, with the CPU-seconds of each."""
    from titanlite.plan.recorder import Recorder

    class Timed:
        """An operator that measures its calls."""

        def __init__(self, function: Any) -> None:
            self.function: Any = function
            self.seconds: float | None = None

        def __getattr__(self, name: str) -> Any:
            return getattr(self.function, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = self.function(*args, **kwargs)
            self.seconds = time.thread_time() - start
            return result

    samples: list[Sample] = []

    class Timer(Recorder):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            timed, before = Timed(function), len(self.events)
            result = super().__torch_dispatch__(timed, types, args, kwargs)
            # An operator of titanlite runs others, which were measured by themselves.
            if timed.seconds is not None:
                events = self.events[before:]
                samples.extend((one, timed.seconds) for one in events if isinstance(one, Operator))
            return result

    with Timer({}, is_fake=False):
        function()
    return samples


def _medians(runs: Sequence[list[Sample]]) -> list[Sample]:
    """The operators of equal runs, each with its median; a run with other operators is left out."""
    names = [one.name for one, _ in runs[0]]
    same = zip(*(run for run in runs if [one.name for one, _ in run] == names), strict=True)
    return [(of[0][0], statistics.median(seconds for _, seconds in of)) for of in same]


def _time_collectives(rank: int, num_ranks: int) -> Transfers:
    """The CPU-seconds of this rank for each collective, by bytes."""
    import torch
    import torch.distributed as dist

    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks

    def exchange(whole: torch.Tensor, other: torch.Tensor) -> None:
        operations = [
            dist.P2POp(dist.isend, whole, right),
            dist.P2POp(dist.irecv, other, left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    # torch 2.13 renames both, and warns of the old names.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    found: Transfers = []
    for num_bytes in SIZES:
        whole, other = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        part = torch.zeros(num_bytes // 4 // num_ranks)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": partial(gather, whole, part),
            "reduce_scatter": partial(reduce_scatter, part, whole),
            "all_reduce": partial(dist.all_reduce, whole),
            "all_to_all": partial(dist.all_to_all_single, other, whole),
            "broadcast": partial(dist.broadcast, whole, 0),
            "send": partial(exchange, whole, other),
        }
        for kind in COLLECTIVES:
            call, seconds = calls[kind], []
            call()
            for _ in range(REPETITIONS[num_bytes]):
                start = time.process_time()
                call()
                seconds.append(time.process_time() - start)
            # Of an exchange, half is the message that is sent.
            share = 0.5 if kind == "send" else 1.0
            found.append((kind, num_bytes, num_ranks, share * statistics.median(seconds)))
    return found
