"""CPU-seconds of steps, operators and collectives, measured on local ranks.

Each function runs on the ranks that `spawn` starts, with one thread on each. CPU-seconds are
measured, since wall time on shared cores is noise. They still vary by a third from minute to minute
if other machines share the processor, so a fixed probe runs beside whatever is measured. Results
are in units of the probe's CPU-seconds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from titanlite.config import JobConfig, resolve_job
from titanlite.ranks.launch import ALONE, Place
from titanlite.tools.planner.events import Operator

Sample = tuple[Operator, float]
"""An operator, and the CPU time of a call."""
Transfers = list[tuple[str, int, int, float]]
"""Kind, bytes of the whole tensor, ranks, and CPU time of a rank."""


class Timings(NamedTuple):
    """What a rank has measured, in units of the probe, and the probe's CPU-seconds each time."""

    values: list[Any]
    probes: list[float]


WARM_UP = 2
"""Steps that are not measured: optimizer state and buffers are allocated in the first."""
NUM_RECORDED = 4
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
SIZES = (1 << 12, 1 << 18, 1 << 22)
REPETITIONS = {1 << 12: 20, 1 << 18: 10, 1 << 22: 3}


class Probe:
    """Matrix products and sums that take about 5 ms, and say how fast the machine is now."""

    def __init__(self) -> None:
        import torch

        self._matrix, self._vector = torch.randn(256, 256), torch.randn(1 << 18)
        self.seconds: list[float] = []
        self.run()

    def time(self, function: Callable[[], object]) -> float:
        """The CPU time of a call, in units of the probe, which runs before and after it."""
        before = self.run()
        start = time.process_time()
        function()
        seconds = time.process_time() - start
        return seconds / self.mean_with(before)

    def mean_with(self, before: float) -> float:
        """The mean of an earlier run and of one now."""
        return (before + self.run()) / 2

    def run(self) -> float:
        """The CPU-seconds of a run."""
        import torch

        start = time.process_time()
        for _ in range(10):
            torch.mm(self._matrix, self._matrix)
        for _ in range(30):
            torch.add(self._vector, self._vector)
        self.seconds.append(time.process_time() - start)
        return self.seconds[-1]


def time_steps(place: Place, configs: Sequence[JobConfig], num_steps: int) -> Timings:
    """The CPU time of each step of each job on this rank."""
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    found = []
    with open_world(place) as world:
        torch.set_num_threads(1)
        probe = Probe()
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            times = [probe.time(job.step) for _ in range(WARM_UP + num_steps)]
            found.append(times[WARM_UP:])
    return Timings(found, probe.seconds)


def time_operators(
    place: Place | None, configs: Sequence[JobConfig], products: Sequence[tuple[int, int, int]] = ()
) -> Timings:
    """The operators of a step of each job, and of products of (m, n, k), with their CPU times.

    Without a place, each rank runs the jobs alone.
    """
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    found: list[Sample] = []
    with open_world(place or ALONE) as world:
        torch.set_num_threads(1)
        probe = Probe()
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            job.step()
            found += _means([_record(job.step, probe) for _ in range(NUM_RECORDED)])
        for kind in (torch.float32, torch.bfloat16):
            for m, n, k in products:
                a, b = torch.randn(m, k, dtype=kind), torch.randn(k, n, dtype=kind)
                product = partial(torch.mm, a, b)
                found += _means([_record(product, probe) for _ in range(NUM_RECORDED)])
    return Timings(found, probe.seconds)


def time_operators_alone(
    _: Place, configs: Sequence[JobConfig], products: Sequence[tuple[int, int, int]]
) -> Timings:
    """time_operators of jobs of one rank, on each of several ranks at a time."""
    return time_operators(None, configs, products)


def time_collectives(place: Place) -> Timings:
    """The CPU time of this rank for each collective, by bytes (Transfers)."""
    import torch

    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        torch.set_num_threads(1)
        probe = Probe()
        return Timings(_time_collectives(world.rank, world.size, probe), probe.seconds)


def _record(function: Callable[[], object], probe: Probe) -> list[Sample]:
    """Call a function; the operators that it ran, with the CPU time of each."""
    from titanlite.tools.planner.recorder import StepRecorder

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

    class Timer(StepRecorder):
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

    before = probe.run()
    with Timer({}, is_fake=False):
        function()
    unit = probe.mean_with(before)
    return [(operator, seconds / unit) for operator, seconds in samples]


def typical(times: Sequence[float]) -> float:
    """The mean, without times above three times the median.

    Times are skewed, so a sum of medians would be less than what a step takes.
    """
    most = 3 * statistics.median(times)
    return statistics.fmean(one for one in times if one <= most)


def _means(runs: Sequence[list[Sample]]) -> list[Sample]:
    """The operators of equal runs, each with its typical time, without runs of other operators."""
    names = [one.name for one, _ in runs[0]]
    same = zip(*(run for run in runs if [one.name for one, _ in run] == names), strict=True)
    return [(of[0][0], typical([taken for _, taken in of])) for of in same]


def _time_collectives(rank: int, num_ranks: int, probe: Probe) -> Transfers:
    """The CPU time of this rank for each collective, by bytes."""
    import torch
    import torch.distributed as dist

    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks

    def exchange(whole: torch.Tensor, other: torch.Tensor) -> None:
        operations = [dist.P2POp(dist.isend, whole, right), dist.P2POp(dist.irecv, other, left)]
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
            before = probe.run()
            for _ in range(REPETITIONS[num_bytes]):
                start = time.process_time()
                call()
                seconds.append(time.process_time() - start)
            # Of an exchange, half is the message that is sent.
            share = (0.5 if kind == "send" else 1.0) / probe.mean_with(before)
            found.append((kind, num_bytes, num_ranks, share * typical(seconds)))
    return found
