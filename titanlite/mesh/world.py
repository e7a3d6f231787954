"""The world of one run: device, process group, threads and memory allocator, and their teardown."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from titanlite.mesh.launch import Place


@dataclass(frozen=True)
class World:
    """This process among all: its rank, the number of ranks, and its device."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the one rank that prints and writes."""
        return self.rank == 0


@contextlib.contextmanager
def open_world(
    place: Place, device_type: str = "cpu", *, init_timeout_seconds: float = 300
) -> Iterator[World]:
    """Join the process group of `place` (gloo on CPU, NCCL on CUDA) and leave it at the end.

    Shares the machine's cores out over its ranks and fixes the C allocator's thresholds. Where all
    ranks are on one node, gloo and NCCL meet over the loopback interface.
    """
    if place.is_one_node:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo" if sys.platform == "linux" else "lo0")
    keep_freed_memory()
    torch.set_num_threads(max(1, num_cores() // place.local_world_size))
    if device_type == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        # gloo carries the CPU tensors of offloaded parameters.
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    dist.init_process_group(
        backend,
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=init_timeout_seconds),
        device_id=device if device_type == "cuda" else None,
    )
    try:
        yield World(place.rank, place.world_size, place.local_rank, place.local_world_size, device)
    finally:
        dist.destroy_process_group()


def num_cores() -> int:
    """The CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Have glibc keep freed memory instead of giving it back and faulting it in at every step.

    Large tensors are freed and allocated anew at each step; by default each is a mapping of its
    own, and zeroing its pages costs a fifth of a step on CPU. No effect without glibc.
    """
    if sys.platform != "linux":
        return
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST = -1, -3, 2**31 - 1
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
        libc.mallopt(M_TRIM_THRESHOLD, LARGEST)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on `device`: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def set_timeout(seconds: float) -> None:
    """From now on, end a collective of any process group that has waited for so long."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
