"""A world in one process: every rank is a thread, with a state of its own of what torch keeps once.

    results = run_threads(function, places, *args)      # for spawn(..., threads=True)

One rank runs at a time (turns.py), and the settings that a process has once (random generators,
torch.distributed's groups, default dtype) are exchanged as it hands over. All ranks share one GPU,
or the CPU. What only processes can do is refused by those who start a world.
"""

import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from titanlite import pickles
from titanlite.errors import ConfigError, RankError, TitanliteError
from titanlite.ranks import settings
from titanlite.ranks.allocations import Allocations
from titanlite.ranks.hang_state import REMEMBERED_CALLS, stack_of
from titanlite.ranks.machine import MOST_THREADS
from titanlite.ranks.report import Call, Message, RankState, Report, write_report
from titanlite.ranks.signals import StopRequest
from titanlite.ranks.thread_group import BACKEND, InFlight, ThreadGroup
from titanlite.ranks.turns import Turns, current_rank, is_rank
from titanlite.ranks.unwatched import Unwatched

# What torch keeps once for a process, and each rank needs for itself: the owners, as
# "module:attributes", and what of them. Each rank begins without groups, and with its own copies of
# the other tables.
GROUPS = "torch.distributed.distributed_c10d:"
OF_PROCESS = {
    GROUPS: (
        *("_world", "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config"),
        *("_group_count", "_tags_to_pg", "_pg_to_tag", "_default_pg_init_method"),
    ),
    "torch.distributed.tensor._random:": ("_rng_tracker",),
    # The operators that `loss_parallel` replaces while a loss is computed.
    "torch.distributed.tensor._api:DTensor._op_dispatcher": ("_custom_op_handlers",),
}
# Up to this many ranks, each has as many threads as the process, which sleep while others run.
MOST_WITH_ALL_THREADS = 8
# Up to this many ranks, memory is counted: until a step ends, its allocations take some MB a rank.
MOST_COUNTED = 64


class State:
    """What the process has once, as a rank left it: groups of ranks, generators, dtype."""

    def __init__(self, before: "State | None" = None) -> None:
        self.names = [(owner, name, getattr(owner, name)) for owner, name in _of_process()]
        self.torch, self.python = torch.get_rng_state(), random.getstate()
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self.dtype, self.deterministic = torch.get_default_dtype(), settings.deterministic()
        # NumPy needs longer for its state than for a turn, and few programs draw from it.
        self.numpy_bytes = _numpy_bytes()
        if before is None or before.numpy_bytes != self.numpy_bytes or before.numpy["has_gauss"]:
            self.numpy: Any = np.random.get_state(legacy=False)
        else:
            self.numpy = before.numpy

    def begin(self) -> None:
        """Let a rank start from this state of the process, with groups and tables of its own."""
        self.apply()
        if self.cuda is None and torch.cuda.is_initialized():
            # Another rank was the first to use the GPU: begin as a process does.
            torch.cuda.manual_seed(torch.initial_seed())
        groups = [name for _, name in _of_process(GROUPS)]
        for owner, name, value in self.names:
            if name in groups:
                is_plain = value is None or isinstance(value, str)
                setattr(owner, name, None if is_plain else type(value)())
            else:
                setattr(owner, name, copy.copy(value))

    def apply(self) -> None:
        """Put this state in place."""
        for owner, name, value in self.names:
            setattr(owner, name, value)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        if _numpy_bytes() != self.numpy_bytes or self.numpy["has_gauss"]:
            np.random.set_state(self.numpy)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        settings.set_deterministic(self.deterministic)


@functools.cache
def _of_process(*owners: str) -> tuple[tuple[Any, str], ...]:
    """The owner and the name of all that is exchanged as ranks take turns."""
    found = []
    for owner in owners or OF_PROCESS:
        module, _, attributes = owner.partition(":")
        value: Any = import_module(module)
        for attribute in filter(None, attributes.split(".")):
            value = getattr(value, attribute)
        found += [(value, name) for name in OF_PROCESS[owner] if hasattr(value, name)]
    return tuple(found)


def _numpy_bytes() -> bytes:
    """The state of NumPy's generator without the normal number that it may keep for later."""
    generator: Any = np.random.mtrand._rand._bit_generator
    return ctypes.string_at(generator.ctypes.state_address, (624 + 1) * 4)


class MeshIdentities:
    """In place of `threading` where a mesh asks for its thread, which is part of its equality.

    A later thread may have the number of one that has ended, and torch keeps plans of DTensor for
    equal meshes: those of another rank, in a world before this one. So every rank of every world
    has a number of its own.
    """

    def __init__(self) -> None:
        self._number_of_world = next(_worlds)

    def get_ident(self) -> int:
        return self._number_of_world * MOST_THREADS + current_rank()


_worlds = itertools.count(1)


class ThreadWorld(Unwatched):
    """A world whose ranks are threads of this process; there is one at a time."""

    def __init__(self, places: Sequence[Any], stop: StopRequest | None = None) -> None:
        super().__init__()
        self.size = len(places)
        self._places = [replace(place, orders=stop) for place in places]
        self.turns = Turns(self.size, self._stuck, self._enter, self._leave)
        self.exchange = InFlight(self.turns)
        self.axes: dict[str, str] = {}
        self.stuck: Report | None = None
        """Where the ranks were once none of them could go on."""
        self._patches, self._num_patched = contextlib.ExitStack(), 0
        self._before, self._states = State(), dict[int, State]()
        self._allocations = dict[int, Allocations]()
        self._profiled: int | None = None

    def run(self, function: Callable[..., Any], arguments: bytes) -> list[Any]:
        """`function(place, *arguments)` on every rank, each with arguments of its own."""
        of_process = torch.get_num_threads()

        def serve(rank: int) -> Any:
            torch.set_num_threads(of_process if self.size <= MOST_WITH_ALL_THREADS else 1)
            return function(self._places[rank], *pickles.loads(arguments))

        try:
            return self.turns.run(serve)
        finally:
            self._before.apply()

    def open_group(self, options: Any, _: Any) -> ThreadGroup:
        """A new process group of this thread's rank, as torch asks for one."""
        ranks = list(options.global_ranks_in_group) or list(range(self.size))
        return ThreadGroup(self.exchange, options.group_id, options.group_rank, ranks)

    def _enter(self, rank: int) -> None:
        if rank in self._states:
            self._states[rank].apply()
        else:
            self._before.begin()

    def _leave(self, rank: int) -> None:
        self._states[rank] = State(self._states.get(rank))

    @contextlib.contextmanager
    def counting_memory(self, device_type: str) -> Iterator[None]:
        """Inside, count what this rank allocates, until it starts a profiler of torch."""
        if self.size > MOST_COUNTED:
            yield
            return
        rank = current_rank()
        self._allocations[rank] = Allocations(device_type)
        self._allocations[rank].start()
        try:
            yield
        finally:
            self._stop_counting()

    def peak_bytes(self, device: torch.device) -> int | None:
        """The most that this rank had allocated at a time; None if that is not counted."""
        own = self._allocations.get(current_rank())
        if own is None:
            return None
        own.stop()
        own.start()
        return own.peak_bytes

    def note_profiler(self, *, starts: bool) -> None:
        """This rank starts or ends torch's profiler, which crashes on two threads at a time."""
        if starts and self._profiled not in (None, current_rank()):
            raise TitanliteError(
                f"torch's profiler runs on rank {self._profiled}, and on one thread at a time; "
                "start it on one rank, or run the ranks as processes"
            )
        self._profiled = current_rank() if starts else None
        self._stop_counting()

    def _stop_counting(self) -> None:
        own = self._allocations.pop(current_rank(), None)
        if own is not None:
            own.stop()

    def describe(self) -> str:
        """Where each rank is, and what it waits for; a line for each."""
        report = self.stuck or write_report(self._rank_states(), {}, "", self.describe_place)
        return "\n".join(report.body.splitlines()[1 : self.size + 1])

    def _stuck(self) -> tuple[int, BaseException]:
        """The rank that the others wait for, and the report of all ranks."""
        states, described = self._rank_states(), self.describe_place
        report = write_report(states, {}, "", described, otherwise="no rank can go on")
        self.stuck = report
        return report.rank, RankError(report.rank, report.headline, report.body)

    def _rank_states(self) -> dict[int, RankState]:
        groups = {
            name: (self.axes.get(name) or group.label, group.ranks)
            for name, group in self.exchange.groups.items()
        }
        waits = self.turns.waits()
        states = {}
        for rank in range(self.size):
            state = states[rank] = RankState(rank, groups=groups)
            if rank not in waits:
                failure = self.turns.failure
                state.finished = "has finished" if failure is None else "was ended"
                if failure is not None and failure[0] == rank:
                    state.finished = f"has failed with {type(failure[1]).__name__}"
                continue
            state.stack, state.site = stack_of(self.turns.thread_of(rank))
            waited = waits[rank]
            # Once it has happened, the rank waits for its turn alone.
            what = None if waited is None or waited.has_happened else waited.what
            # What a rank has called and does not wait for yet counts as done.
            waits_in = (what.group, what.number) if isinstance(what, Call) else None
            state.calls = [
                replace(call, is_done=(call.group, call.number) != waits_in)
                for call in list(self.exchange.calls[rank])[-REMEMBERED_CALLS:]
            ]
            if isinstance(what, Message):
                state.message = what
        return states

    @contextlib.contextmanager
    def patched(self, patch: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Inside, the code of the process is changed, from the first rank until the last one."""
        if self._num_patched == 0:
            self._patches = contextlib.ExitStack()
            self._patches.enter_context(patch())
        self._num_patched += 1
        try:
            yield
        finally:
            self._num_patched -= 1
            if self._num_patched == 0:
                self._patches.close()

    def name_groups(self, axes: Mapping[str, str]) -> None:
        self.axes.update(axes)


_world: ThreadWorld | None = None


def run_threads(
    function: Callable[..., Any], places: Sequence[Any], *args: Any, stop: StopRequest | None = None
) -> list[Any]:
    """What spawn does with `threads`: a thread of this process for each of `places`.

    No thread outlives the call. Raises ConfigError inside a world of threads.
    """
    global _world
    if _world is not None:
        raise ConfigError("ranks: a rank that is a thread cannot start ranks as threads")
    arguments = pickles.dumps(args)
    with contextlib.ExitStack() as exits:
        exits.enter_context(settings.own_settings())
        settings.initial_warnings()
        settings.choose_kernels()
        # FakeTensorMode calls it, too. In a thread, a CUDA build of torch 2.11 crashes in it.
        torch._C._ensureCUDADeviceGuardSet()
        exits.enter_context(settings.keeping_freed_memory())
        gc.freeze()  # the garbage collector skips torch's million objects
        exits.callback(gc.unfreeze)
        exits.enter_context(_threaded_groups())
        _world = world = ThreadWorld(places, stop)
        try:
            results = world.run(function, arguments)
        finally:
            _world = None
            gc.collect()  # models of ranks that have ended
    if world.turns.failure is not None:
        rank, error = world.turns.failure
        if isinstance(error, TitanliteError):
            if not isinstance(error, RankError):
                error.rank = rank
            raise error
        text = "".join(traceback.format_exception(error))
        raise RankError(rank, f"{type(error).__name__}: {error}", text) from error
    return results


def thread_world() -> ThreadWorld:
    """The world of this thread's rank."""
    assert _world is not None
    current_rank()
    return _world


@contextlib.contextmanager
def _threaded_groups() -> Iterator[None]:
    """Inside, every process group that a rank opens, of whatever backend, is one of threads."""
    helper = c10d._new_process_group_helper

    def threaded(
        group_size: int, group_rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # `device_id` asks for a communicator of a GPU.
        kwargs.pop("device_id", None)
        return helper(group_size, group_rank, ranks, dist.Backend(BACKEND), *args, **kwargs)

    if BACKEND not in dist.Backend.backend_list:
        devices = dict(dist.Backend.default_device_backend_map)
        dist.Backend.register_backend(
            BACKEND,
            lambda options, _: thread_world().open_group(options, _),
            extended_api=True,
            devices=["cpu", "cuda"],
        )
        dist.Backend.default_device_backend_map.update(devices)
    # Each thread looks up groups by name among its own.
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    try:
        with (
            patch.object(device_mesh, "threading", MeshIdentities()),
            patch.object(c10d, "_new_process_group_helper", threaded),
            patch.object(c10d, "split_group", _split_group),
            patch.object(dist, "split_group", _split_group),
            _noted_profilers(),
        ):
            yield
    finally:
        isolate(False)


@contextlib.contextmanager
def _noted_profilers() -> Iterator[None]:
    """Inside, the world knows of the profilers that ranks start and end."""
    profiler: Any = torch.autograd.profiler

    def noted(function: Callable[..., Any], starts: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _world is not None and is_rank():
                _world.note_profiler(starts=starts)
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as exits:
        for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
            wrapped = noted(getattr(profiler, name), name != "_disable_profiler")
            exits.enter_context(patch.object(profiler, name, wrapped))
        yield


def _split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    *_: Any,
    group_desc: str | None = None,
    **__: Any,
) -> Any:
    """The part of a group that this rank is in, or None; torch's own needs an accelerator."""
    if not split_ranks or not all(split_ranks):
        raise ValueError("split_ranks cannot be None or empty, and no group of it")
    parent = parent_pg or dist.group.WORLD
    ranks, own = dist.get_process_group_ranks(parent), dist.get_rank(parent)
    for members in split_ranks:
        if own in members:
            return dist.new_group(
                [ranks[member] for member in sorted(members)],
                use_local_synchronization=True,
                group_desc=group_desc,
            )
    return None
