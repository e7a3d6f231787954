"""Measure the bandwidth of collectives, with the definition of the lecture.

The bandwidth of a collective is the number of bytes that its ring form sends per rank, divided by
the time. It is comparable between algorithms and with a link's data sheet. For a whole tensor of n
bytes on W ranks, a rank sends 2 (W-1)/W n in an all-reduce, and (W-1)/W n in an all-gather or a
reduce-scatter.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titanlite.tools.lab.device import VirtualDevice

SENT_SHARE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Bandwidth:
    """The measurement of one rank.

    `trial_seconds` are the wall times of the trials; `cpu_seconds` is the mean CPU time of a trial,
    including backend threads.
    """

    kind: str
    world_size: int
    num_bytes: int
    trial_seconds: tuple[float, ...]
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """The median of the trials."""
        return statistics.median(self.trial_seconds)

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank of a ring sends: those of an all-reduce are twice as many."""
        return self.num_bytes * SENT_SHARE[self.kind] * (self.world_size - 1) / self.world_size

    @property
    def bytes_per_second(self) -> float:
        """bytes * 2 (W-1) / (W t) for an all-reduce, half of it for the other collectives."""
        return self.sent_bytes / self.seconds


def measure_bandwidth(
    device: VirtualDevice,
    kind: str = "all_reduce",
    num_bytes: int = 1 << 24,
    *,
    form: str = "torch",
    num_trials: int = 5,
) -> Bandwidth:
    """Time one collective of a float32 tensor of `num_bytes` over the whole mesh, on this device.

    `kind` is "all_reduce", "all_gather" or "reduce_scatter". `form` is "torch" for the collectives
    of torch.distributed, "naive" or "ring" for those built from send and receive. The first trial
    is a warmup; every trial starts at a barrier.
    """
    tensor = torch.rand(num_bytes // 4, device=device.device)
    call = _by_torch(kind, tensor) if form == "torch" else _by_hand(device, kind, tensor, form)
    call()
    times = []
    cpu_start = time.process_time()
    for _ in range(num_trials):
        dist.barrier()
        start = time.perf_counter()
        call()
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    cpu_seconds = (time.process_time() - cpu_start) / num_trials
    return Bandwidth(kind, device.mesh.size, num_bytes, tuple(times), cpu_seconds)


def _by_torch(kind: str, tensor: torch.Tensor) -> Callable[[], object]:
    parts = list(tensor.chunk(dist.get_world_size()))
    if kind == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    mine = torch.empty_like(parts[0])
    if kind == "all_gather":
        return lambda: dist.all_gather(parts, mine)
    return lambda: dist.reduce_scatter(mine, parts)


def _by_hand(
    device: VirtualDevice, kind: str, tensor: torch.Tensor, form: str
) -> Callable[[], object]:
    device.algorithm = form
    if kind == "all_gather":
        tensor = tensor.chunk(device.mesh.size)[device.rank]
    return lambda: getattr(device, kind)(tensor)
