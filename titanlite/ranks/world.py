"""The world of a run: device, process group, threads and memory allocator, and their teardown.

open_world does the rendezvous, starts the watchdog and creates the process group; World is what the
rest of the program sees of it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.ranks import settings
from titanlite.ranks.attempt import agree_on_attempt
from titanlite.ranks.launch import THREADS, Place
from titanlite.ranks.machine import num_cores
from titanlite.ranks.temporary import writing
from titanlite.ranks.thread_group import ThreadGroup
from titanlite.ranks.unwatched import Unwatched
from titanlite.ranks.watch import Traces, watching


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of ranks, and its device."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    watch: Unwatched = field(default_factory=Unwatched)
    """The watchdog; one that does nothing in a world of one process with one rank."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def set_timeout(self, seconds: float, key: str = "comm.train_timeout_seconds") -> None:
        """Set the timeout after which a rank that waits for others ends the run.

        `key` is the name of this limit in the report.
        """
        self.watch.set_timeout(seconds, key)
        _set_group_timeouts(seconds)

    def name_places(self, describe_place: Callable[[int], str]) -> None:
        """Set the function that gives the mesh coordinates of a rank, for reports."""
        self.watch.describe_place = describe_place

    def name_groups(self, axes: Mapping[str, str]) -> None:
        """Set the axis of each process group, for reports.

        A new group has torch's default timeout; this method also sets the timeout of these groups
        to the world's timeout.
        """
        self.watch.name_groups(axes)
        if math.isfinite(self.watch.timeout_seconds):
            _set_group_timeouts(self.watch.timeout_seconds)


@contextlib.contextmanager
def open_world(
    place: Place,
    device_type: str = "cpu",
    *,
    init_timeout_seconds: float = 300,
    trace_buf_size: int = 2000,
    traces: Traces | None = None,
    describe_place: Callable[[int], str] = lambda rank: "",
) -> Iterator[World]:
    """A context manager: joins the process group of `place`, and leaves it when the context ends.

    Its backend is gloo on CPU and NCCL on CUDA, over the loopback interface if all ranks are on one
    node. The machine's cores are divided among its ranks.

    If ranks wait for each other for too long, or a rank is lost, the run ends with a report, and
    LostWorldError is raised here. For local ranks the report is the launcher's RankError; otherwise
    it is printed on stderr. The flight recorders keep `trace_buf_size` collectives, and are written
    to `traces`. `describe_place` returns the mesh coordinates of a rank for reports;
    `World.name_places` can set it later.
    """
    if place.rendezvous == THREADS:
        with _open_thread_world(place, device_type, describe_place) as world:
            yield world
        return
    with contextlib.ExitStack() as exits:
        exits.enter_context(settings.own_settings())
        exits.enter_context(settings.keeping_freed_memory())
        settings.prepare_process(
            one_node=place.is_one_node,
            num_recorded=trace_buf_size,
            num_threads=max(1, num_cores() // place.local_world_size),
        )
        if device_type == "cuda":
            device = torch.device("cuda", place.local_rank)
            exits.enter_context(torch.cuda.device(device))
            exits.enter_context(torch.random.fork_rng([device], device_type="cuda"))
            # gloo carries the CPU tensors of offloaded parameters.
            backend = "cpu:gloo,cuda:nccl"
        else:
            device = torch.device("cpu")
            backend = "gloo"
        timeout = timedelta(seconds=init_timeout_seconds)
        meeting, store = _meet(place, timeout)
        watch = Unwatched(describe_place)
        # Registered first, so that it runs after the watchdog's report, which needs the groups.
        exits.callback(_leave_group)
        if store is not None:
            of_watch = (place, store, init_timeout_seconds, traces, describe_place)
            watch = exits.enter_context(watching(*of_watch, on_gpu=device_type == "cuda"))
        # A rank that has nothing to do must not leave while another still connects to it.
        with settings.environment(TORCH_DIST_INIT_BARRIER="1"):
            dist.init_process_group(
                backend,
                **meeting,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=device if device_type == "cuda" else None,
            )
        yield World(
            place.rank, place.world_size, place.local_rank, place.local_world_size, device, watch
        )


@contextlib.contextmanager
def _open_thread_world(
    place: Place, device_type: str, describe_place: Callable[[int], str]
) -> Iterator[World]:
    """The world of a rank that is a thread; run_threads has prepared the process.

    On CUDA all ranks share the current GPU. A backward pass then runs on the rank's own thread, as
    on the CPU: in autograd's one thread for the GPU, the first rank to wait would stop them all.
    """
    from titanlite.ranks.threads import thread_world

    of_all = thread_world()
    of_all.describe_place = describe_place
    device = torch.device(device_type)
    with contextlib.ExitStack() as exits:
        if device_type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            exits.enter_context(torch.autograd.set_multithreading_enabled(False))
        exits.callback(_leave_group)
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=place.rank, world_size=place.world_size
        )
        yield World(
            *(place.rank, place.world_size, place.local_rank, place.local_world_size),
            device=device,
            watch=of_all,
        )


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(place: Place, timeout: timedelta) -> tuple[dict[str, Any], Any]:
    """Arguments for init_process_group's rendezvous, and the watchdog's store (None: one rank)."""
    if place.world_size == 1:
        return {"store": dist.HashStore()}, None
    if place.rendezvous.startswith("file://"):
        path = Path(place.rendezvous.removeprefix("file://"))
        # Not by the URL: PyTorch takes what follows a ? or # in a folder's name for its query.
        with writing(path):
            watch = dist.FileStore(f"{path}-watch", place.world_size)
            return {"store": dist.FileStore(str(path), place.world_size)}, watch
    rendezvous = dist.rendezvous(place.rendezvous, place.rank, place.world_size, timeout=timeout)
    kept: Any = next(rendezvous)[0]
    attempt = agree_on_attempt(kept, place.rank, place.world_size, timeout.total_seconds())
    meeting = dist.PrefixStore("default_pg", dist.PrefixStore(attempt, kept))
    # A separate connection: a blocking call would block every user of a shared one.
    return {"store": meeting}, dist.PrefixStore("watch", dist.PrefixStore(attempt, kept.clone()))


def _set_group_timeouts(seconds: float) -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        set_group_timeout(timedelta(seconds=seconds), group)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Set the timeout of a process group; one of threads has none."""
    # torch 2.14 makes this public as set_timeout, and warns of the old name.
    if not isinstance(group, ThreadGroup):
        getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(timeout, group)
