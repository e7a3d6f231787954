"""Worlds that are stuck or lose a rank end by themselves, and name the rank, its axis and place."""

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanlite.errors import ConfigError, RankError
from titanlite.ranks.crash_state import BlackBox, read_black_box
from titanlite.ranks.launch import FAULTS, Place, spawn

TIMEOUT_SECONDS = 2.0
# From the end of the timeout to the end of the last process, on a machine that is busy.
PATIENCE_SECONDS = 15
BAD_RANK = 2


def run_badly(place: Place, misbehave: Callable[[Any, Any, bool], None]) -> None:
    """Some collectives over (dp_shard 2, tp 2), and then what `misbehave` does on each rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from titanlite.mesh.parallel_dims import ParallelDims
    from titanlite.ranks.world import open_world

    dims = ParallelDims(dp_shard=2, tp=2)
    with open_world(place) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        axes = {mesh.get_group(axis).group_name: axis for axis in ("dp_shard", "tp")}
        world.name_places(dims.describe_place)
        world.name_groups(axes)
        for axis in ("dp_shard", "tp", "tp"):
            dist.all_reduce(zeros(4), group=mesh.get_group(axis))
        world.set_timeout(TIMEOUT_SECONDS)
        misbehave(dist, mesh, world.rank == BAD_RANK)


def zeros(count: int) -> Any:
    import torch

    return torch.zeros(count)


def fall_asleep(dist: Any, mesh: Any, is_bad: bool) -> None:
    if is_bad:
        threading.Event().wait()
    dist.all_reduce(zeros(8), group=mesh.get_group("tp"))
    dist.all_reduce(zeros(4))


def hold_the_interpreter(dist: Any, mesh: Any, is_bad: bool) -> None:
    if is_bad:
        ctypes.PyDLL(None).pause()
    dist.all_reduce(zeros(8), group=mesh.get_group("tp"))
    dist.all_reduce(zeros(4))


def compute_in_c(dist: Any, mesh: Any, is_bad: bool) -> None:
    if is_bad:
        re.fullmatch(r"(a+)+b", "a" * 40)
    dist.all_reduce(zeros(8), group=mesh.get_group("tp"))
    dist.all_reduce(zeros(4))


def be_stopped(dist: Any, mesh: Any, is_bad: bool) -> None:
    if is_bad:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(zeros(8), group=mesh.get_group("tp"))
    dist.all_reduce(zeros(4))


def be_killed(dist: Any, mesh: Any, is_bad: bool) -> None:
    if is_bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(zeros(8), group=mesh.get_group("tp"))
    dist.all_reduce(zeros(4))


def skip(dist: Any, mesh: Any, is_bad: bool) -> None:
    if not is_bad:
        dist.all_reduce(zeros(8))
    dist.broadcast(zeros(16), 0)
    dist.all_reduce(zeros(4))


def give_another_shape(dist: Any, mesh: Any, is_bad: bool) -> None:
    dist.all_reduce(zeros(1000 if is_bad else 500))


def swap(dist: Any, mesh: Any, is_bad: bool) -> None:
    calls = [lambda: dist.all_reduce(zeros(64)), lambda: dist.broadcast(zeros(4), 0)]
    for call in reversed(calls) if is_bad else calls:
        call()
    dist.barrier()


def send_nothing(dist: Any, mesh: Any, is_bad: bool) -> None:
    if is_bad:
        threading.Event().wait()
    if mesh.get_local_rank("dp_shard") == 0 and mesh.get_local_rank("tp") == 0:
        wait_for_message(dist)
    dist.all_reduce(zeros(4))


def wait_for_message(dist: Any) -> None:
    operations = [dist.P2POp(dist.irecv, zeros(4), BAD_RANK)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def finish(dist: Any, mesh: Any, is_bad: bool) -> None:
    if not is_bad:
        dist.all_reduce(zeros(8), group=mesh.get_group("tp"))
        dist.all_reduce(zeros(8), group=mesh.get_group("dp_shard"))


HERE = "tests/unit/ranks/test_faults.py:"
QUICK: dict[Callable[..., None], tuple[str, ...]] = {
    fall_asleep: (
        "rank 2: did not reach all_reduce 1 over the world and all_reduce 3 over tp; ranks 0, ",
        "waiting in them; rank 2 is at " + HERE,
        "in fall_asleep",
        "Python stack of rank 2 (most recent call last):",
        "rank 3 (dp_shard 1, tp 1) is waiting for rank 2 in all_reduce 3 over tp (ranks 2, 3), 8 ",
        "threading.py",
    ),
    skip: (
        "rank 2: at collective 1 over the world it called broadcast of 16 float32 at " + HERE,
        "; ranks 0, 1, 3 called all_reduce of 8 float32 at " + HERE,
        "in skip",
    ),
    give_another_shape: (
        "rank 2: at collective 1 over the world it called all_reduce of 1,000 float",
        "; ranks 0, 1, 3 called all_reduce of 500 float32",
        "in give_another_shape",
    ),
    be_killed: (
        "rank 2: was killed by SIGKILL",
        "rank 2 (dp_shard 1, tp 0) has died",
        "rank 3 (dp_shard 1, tp 1) is waiting for rank 2 in all_reduce 3 over tp",
    ),
}
SLOW: dict[Callable[..., None], tuple[str, ...]] = {
    hold_the_interpreter: (
        "rank 2: does not respond (process ",
        "Python stack of rank 2, as last recorded (most recent call last):",
        "in hold_the_interpreter",
    ),
    compute_in_c: (
        "rank 2: does not respond (process ",
        "Python stack of rank 2, as last recorded (most recent call last):",
        "in compute_in_c",
        "re.py" if sys.version_info < (3, 11) else "re/__init__.py",
    ),
    be_stopped: (
        "rank 2: is stopped by a signal (process ",
        "rank 3 (dp_shard 1, tp 1) is waiting for rank 2 in all_reduce 3 over tp",
    ),
    swap: (
        "rank 2: at collective 1 over the world it called broadcast of 4 float32",
        "; ranks 0, 1, 3 called all_reduce of 64 float32",
    ),
    send_nothing: (
        "rank 2: did not reach ",
        "the recv over the world with rank 0",
        "rank 0 (dp_shard 0, tp 0) is waiting for rank 2 in a recv over the world, called at "
        + HERE,
    ),
    finish: (
        "rank 2: did not reach all_reduce 2 over dp_shard and all_reduce 3 over tp; ranks ",
        "; rank 2 has finished its run",
    ),
}


def check(misbehave: Callable[..., None], expected: tuple[str, ...]) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        spawn(run_badly, 4, misbehave, timeout_seconds=60)
    said = f"{raised.value.rank_traceback}\n{raised.value}"
    for words in expected:
        assert words in said, said
    assert raised.value.rank == BAD_RANK
    assert time.monotonic() - start < TIMEOUT_SECONDS + PATIENCE_SECONDS


@pytest.mark.parametrize("misbehave", QUICK, ids=lambda function: function.__name__)
def test_a_bad_rank_is_named(misbehave):
    check(misbehave, QUICK[misbehave])


@pytest.mark.slow
@pytest.mark.parametrize("misbehave", SLOW, ids=lambda function: function.__name__)
def test_a_bad_rank_is_named_in_other_cases(misbehave):
    check(misbehave, SLOW[misbehave])


def keep_the_interpreter(place: Place, seconds: float) -> str:
    """Rank 1 runs Python in which no other thread gets a turn; what is in its black box then."""
    import torch.distributed as dist

    from titanlite.ranks.world import open_world

    with open_world(place):
        dist.barrier()
        if place.rank == 1:
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1000)
            end, count = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                count += sum(map(abs, range(10)))
            box = Path(place.rendezvous.removeprefix("file://")).parent / FAULTS / "stack-1"
            text = ""
            # In one call, which gives other threads a turn: in two, the note may change between.
            while not text.endswith("\n\n"):
                with box.open("rb", buffering=0) as file:
                    text = (file.read(1 << 16) or b"").decode()
            sys.setswitchinterval(interval)
        dist.barrier()
        return text if place.rank == 1 else ""


def test_nobody_reads_the_stack_of_a_healthy_rank_without_the_interpreters_lock():
    """Whatever does so crashes the process now and then, however long its watch is kept waiting."""
    _, text = spawn(keep_the_interpreter, 2, 4.0, timeout_seconds=60)
    thread, *noted = text.strip().splitlines()
    assert thread.startswith("0x")
    # As `note` writes it; the interpreter's own lines would be added behind.
    assert all(re.fullmatch(r"\S+:\d+ in \S+", line) for line in noted), text


def test_a_watch_that_fails_leaves_the_run_alone(capfd):
    import torch.distributed as dist

    from titanlite.ranks.watch import Watch

    class OddStore:
        """Another thread's store: it is there, and what it says makes no sense."""

        def __init__(self, store: Any) -> None:
            self.store = store
            self.was_asked = threading.Event()

        def check(self, keys: list[str]) -> bool:
            self.was_asked.set()
            raise ValueError("no such word")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    store = OddStore(dist.HashStore())
    watch = Watch(Place(0, 2, 0, 2, rendezvous="env://"), store, 60)
    assert store.was_asked.wait(10)
    store.check = lambda keys: False  # type: ignore[method-assign]
    lost = dist.DistNetworkError("Connection closed by peer")
    # Nobody else tells of an error of this rank now, so that it is raised as it is.
    assert not watch.explain(lost)
    watch.close()
    said = "rank 0: the watchdog failed with ValueError (no such word); "
    assert said + "the run continues without it\n" in capfd.readouterr().err


def test_a_healthy_rank_is_watched_without_what_can_crash_it(monkeypatch, tmp_path):
    import torch.distributed as dist

    from titanlite.ranks import watch as watch_module
    from titanlite.ranks.hang_state import c10d

    def crash(*arguments: Any) -> Any:
        raise AssertionError("reading this can crash a process whose main thread runs")

    # Frame objects; the flight recorder.
    monkeypatch.setattr(sys, "_current_frames", crash)
    monkeypatch.setattr(c10d, "_dump_fr_trace", crash)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", crash)
    monkeypatch.setattr(watch_module, "POLL_SECONDS", 0.001)
    place = Place(0, 2, 0, 2, rendezvous=f"file://{tmp_path}/meet")
    (tmp_path / "faults").mkdir()
    watch = watch_module.Watch(place, dist.HashStore(), 60)
    (box,) = tmp_path.rglob("stack-0")

    def is_seen() -> bool:
        """The first look may find the main thread in the start of the watchdog's thread."""
        return any(
            "test_faults.py" in line and line.endswith("without_what_can_crash_it")
            for line in read_black_box(str(box))
        )

    deadline = time.monotonic() + 10
    while not (was_seen := is_seen()) and time.monotonic() < deadline:
        pass
    watch.close()
    assert was_seen


def count_calls(place: Place) -> list[list[int]]:
    import torch
    import torch.distributed as dist

    from titanlite.ranks.hang_state import sequence_numbers
    from titanlite.ranks.world import open_world

    with open_world(place):
        group, x = dist.new_group([0, 1]), torch.ones(2)
        calls = [
            lambda: dist.all_reduce(x, group=group),
            lambda: (dist.send if place.rank == 0 else dist.recv)(x, 1 - place.rank, group=group),
            lambda: dist.all_reduce(x),
        ]
        numbers = [sequence_numbers()]
        for call in calls:
            call()
            numbers.append(sequence_numbers())
        return numbers


def test_progress_is_seen_in_collectives_and_in_messages():
    for (world, group), *later in spawn(count_calls, 2, timeout_seconds=60):
        assert later == [[world, group + 1], [world, group + 2], [world + 1, group + 2]]


# Threads that make and free thread states without the GIL, as those of gloo do. The main thread
# reads the stack of another thread, whose innermost function is `wait`.
STATES_COME_AND_GO = """
import ctypes, os, sys, threading, time
from titanlite.ranks.stacks import ThreadStack

with_gil, without_gil = ctypes.pythonapi, ctypes.CDLL(None)
with_gil.PyInterpreterState_Get.restype = ctypes.c_void_p
without_gil.PyThreadState_New.restype = ctypes.c_void_p
for function in (
    without_gil.PyThreadState_New, with_gil.PyThreadState_Clear, with_gil.PyThreadState_Delete
):
    function.argtypes = [ctypes.c_void_p]
interpreter = with_gil.PyInterpreterState_Get()

def come_and_go():
    while True:
        state = without_gil.PyThreadState_New(interpreter)
        with_gil.PyThreadState_Clear(state)
        with_gil.PyThreadState_Delete(state)

def innermost():
    stacks.append(ThreadStack())
    is_ready.set()
    threading.Event().wait()

stacks, is_ready = [], threading.Event()
threading.Thread(target=innermost, daemon=True).start()
is_ready.wait()
while not (seen := stacks[0].read()) or seen[-1].function != "wait":
    pass
for _ in range(3):
    threading.Thread(target=come_and_go, daemon=True).start()
sys.setswitchinterval(1e-5)
for _ in range(1000):
    assert stacks[0].read() == seen
print([place.function for place in seen[-3:]], flush=True)
os._exit(0)
"""


def test_a_stack_is_read_while_other_threads_come_and_go():
    """In Python 3.11, reading the stacks of all threads crashes this process at once."""
    run = subprocess.run(
        [sys.executable, "-c", STATES_COME_AND_GO], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "['innermost', 'wait', 'wait']\n"


def test_a_black_box_harms_no_file(tmp_path):
    box = BlackBox(tmp_path, 0, threading.get_ident())
    box.note(["one", "two"])
    assert read_black_box(box.path) == ["one", "two"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        box.note(["a disk that is full"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    box.note(["three"])
    assert read_black_box(box.path) == ["three"]
    box.close()
    with (tmp_path / "next").open("w+") as file:  # which gets the number that is free now
        file.write("kept")
        file.flush()
        box.note(["four"])
        assert (tmp_path / "next").read_text() == "kept"
    assert read_black_box(box.path) == ["three"]


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named():
    def stay_away(place: Place) -> None:
        from titanlite.ranks.world import open_world

        if place.rank == 1:
            threading.Event().wait()
        with open_world(place, init_timeout_seconds=1):
            pass

    with pytest.raises(RankError, match="rank 1: did not join the rendezvous") as raised:
        spawn(stay_away, 3, timeout_seconds=60)
    assert "comm.init_timeout_seconds" in raised.value.rank_traceback


def save_behind(place: Place) -> None:
    """Rank 0 waits for rank 1 in a step; behind them, 1 waits for 0 in a save."""
    import torch.distributed as dist

    from titanlite.checkpoint.group import CheckpointGroup
    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        ranks = CheckpointGroup(world, 60)
        world.set_timeout(1)
        if world.rank == 1:
            with ranks.with_long_timeout():
                threading.Thread(target=ranks.gathered, args=[0], daemon=True).start()
            threading.Event().wait()
        dist.all_reduce(zeros(8))


def stay_in_a_save(place: Place) -> None:
    from titanlite.checkpoint.group import CheckpointGroup
    from titanlite.ranks.world import open_world

    with open_world(place, init_timeout_seconds=60) as world:
        ranks = CheckpointGroup(world, 1)
        with ranks.with_long_timeout():
            ranks.all_do(read_what_does_not_come if world.rank == 1 else lambda: None)


def read_what_does_not_come() -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("function", "reason", "named"),
    [
        (save_behind, "1 s (comm.train_timeout_seconds)", "all_reduce 1 over the world"),
        (stay_in_a_save, "1 s (comm.checkpoint_timeout_seconds)", "over checkpoints"),
    ],
)
def test_a_save_prints_from_a_step(function, reason, named):
    with pytest.raises(RankError) as raised:
        spawn(function, 2, timeout_seconds=60)
    said = f"{raised.value.rank_traceback}\n{raised.value}"
    assert f"The run has stopped: ranks waited {reason}.\n" in said, said
    assert raised.value.rank == 1, said
    assert "rank 1: did not reach " in said, said
    assert named in str(raised.value), said
    assert f"  {HERE}" in said.split("Python stack of rank 1")[1], said
    assert "unknown place" not in said, said


def test_under_torchrun_the_first_rank_that_fails_says_so():
    import torch.distributed as dist

    from titanlite.ranks.watch import Watch

    store = dist.HashStore()
    told = []
    for rank in (1, 0):
        watch = Watch(Place(rank, 2, rank, 2, rendezvous="env://"), store, 60)
        error = ConfigError("metrics.enable_wandb: no")
        # Looked into at once, and again when the world is left.
        assert not watch.explain(error)
        assert not watch.explain(error)
        watch.close()
        told.append(error.is_printed_here)
    assert told == [True, False]


def share_first(dist: Any) -> None:
    dist.all_reduce(zeros(8))


def share_second(dist: Any) -> None:
    dist.all_reduce(zeros(8))


def test_a_swap_of_equal_collectives_is_named():
    def swap_equal(place: Place, num_bad: int) -> str:
        import torch.distributed as dist

        from titanlite.errors import OrderError
        from titanlite.ranks.order import OrderCheck
        from titanlite.ranks.world import open_world

        with open_world(place):
            check = OrderCheck({})
            calls = (share_first, share_second)
            for call in calls:
                call(dist)
            check()
            for call in reversed(calls) if place.rank < num_bad else calls:
                call(dist)
            try:
                check()
            except OrderError as error:
                return str(error)
            return ""

    assert spawn(swap_equal, 3, 0) == ["", "", ""]
    said = spawn(swap_equal, 3, 1)
    assert len(set(said)) == 1
    assert said[0].startswith("rank 0: at collective 3 over the world it called all_reduce of 8 ")
    for words in ("in share_second before all_reduce", "in share_first; ranks 1, 2 called them"):
        assert words in said[0]
