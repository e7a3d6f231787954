"""A rank on a GPU waits where its flight recorder says so: its stack does not show it."""

import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from titanlite.ranks import hang_state, watch
from titanlite.ranks.hang_state import find_message, gpu_is_overdue, is_overdue, recorded_message
from titanlite.ranks.launch import Place
from titanlite.ranks.stacks import CodePlace as Frame

STEP = Path(__file__).parents[3] / "titanlite" / "training" / "step.py"
TIMEOUT_MS = 100_000
PIPELINE = {"pp": ("pp", (2, 6))}


def entry(name: str, state: str = "scheduled", *, age_s: float = 200, **changes: Any) -> dict:
    """An entry as the flight recorder of NCCL has it, of an operation that is `age_s` old."""
    return {
        "record_id": 0,
        "pg_id": 1,
        "process_group": ("tp", "mesh_tp"),
        "collective_seq_id": 7,
        "p2p_seq_id": 0,
        "op_id": 7,
        "profiling_name": f"nccl:{name}",
        "age_s": age_s,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": TIMEOUT_MS,
        "is_p2p": False,
        "frames": [{"filename": str(STEP), "line": 3, "name": "step"}],
        **changes,
    }


def message(name: str, state: str = "scheduled", **changes: Any) -> dict:
    return entry(name, state, is_p2p=True, process_group=("pp", "mesh_pp"), **changes)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the flight recorders hold."""

    def hold(*entries: dict) -> None:
        # From now on, not from when the entries were made: the tests before this one take time.
        now = time.time_ns()
        made = [{**one, "time_created_ns": now - int(one["age_s"] * 1e9)} for one in entries]
        dumps = {"": pickle.dumps({"entries": []}), "nccl": pickle.dumps({"entries": made})}
        monkeypatch.setattr(hang_state, "dump_recorders", lambda *_: dumps)

    return hold


def blocking_lines() -> list[list[Frame]]:
    """The stacks of a step where it needs a number from the GPU."""
    lines = STEP.read_text().splitlines()
    words = (".tolist()", "total = float(self._summed(")
    found = [n for n, line in enumerate(lines, start=1) if any(word in line for word in words)]
    assert len(found) == 3
    return [[Frame(str(STEP), line, "step")] for line in found]


WAITING = {
    "a collective that has started": [entry("all_reduce", "started")],
    "one whose start is not recorded": [entry("all_gather_into_tensor")],
    "the second of two": [entry("all_reduce", "completed"), entry("all_reduce")],
    "a message": [message("recv 1<-0")],
    "messages in one call": [message("send 0->1"), message("recv 0<-1"), message("coalesced")],
}
WELL = {
    "nothing was called": [],
    "all is done": [entry("all_reduce", "completed")],
    "done, and its state is not read yet": [entry("all_reduce", retired=True)],
    "it has time left": [entry("all_reduce", "started", age_s=TIMEOUT_MS / 1000 - 20)],
    "the operations of a coalesced call, which is done": [
        entry("all_gather"),
        entry("all_gather"),
        entry("coalesced", "completed"),
        message("send 0->1"),
        message("coalesced", "completed"),
    ],
    "a save waits": [entry("x", profiling_name="gloo:all_gather")],
}


@pytest.mark.parametrize("name", WAITING)
def test_an_overdue_collective_on_the_gpu_is_a_wait_whatever_the_stack(
    name: str, record: Callable[..., None]
) -> None:
    record(*WAITING[name])
    for stack in blocking_lines():
        assert not is_overdue(stack, 200)  # the stack alone says that the rank runs
        assert watch_of(stack, on_gpu=True) == [False, False, True]
        assert watch_of(stack, on_gpu=False) == [False, False, False]


@pytest.mark.parametrize("name", WELL)
def test_a_long_computation_is_no_wait(name: str, record: Callable[..., None]) -> None:
    record(*WELL[name])
    assert not gpu_is_overdue()
    for stack in blocking_lines():
        assert watch_of(stack, on_gpu=True) == [False, False, False]


def watch_of(stack: list[Frame], *, on_gpu: bool, looks: int = 3) -> list[bool]:
    """What a watch says of a rank that stays where it is: at the start, and in steps of 60 s."""
    now = [1000.0]
    watcher = watch.Watch.__new__(watch.Watch)
    watcher._still, watcher._still_since, watcher.timeout_seconds = None, 0.0, TIMEOUT_MS / 1000
    watcher._on_gpu, watcher._gpu_seen = on_gpu, -float("inf")
    clock = type("Clock", (), {"monotonic": staticmethod(lambda: now[0])})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "time", clock)
        patch.setattr(hang_state, "sequence_numbers", lambda: [7])
        found = []
        for _ in range(looks):
            found.append(watcher._stands_still(stack))
            now[0] += 60
        return found


def test_the_recorder_of_a_rank_that_is_well_is_read_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading it can crash a process; on the CPU a stack that runs is never looked behind."""
    reads = []
    monkeypatch.setattr(
        hang_state, "dump_recorders", lambda *_: reads.append(1) or {"": pickle.dumps({})}
    )
    stack = blocking_lines()[0]
    watch_of(stack, on_gpu=False, looks=100)
    assert reads == []
    # Not before the timeout, and once in each that follows.
    watch_of(stack, on_gpu=True, looks=2)
    assert reads == []
    watch_of(stack, on_gpu=True, looks=20)
    assert 1 <= len(reads) <= 20 * 60_000 // TIMEOUT_MS


def test_the_account_names_what_the_gpu_waits_for(record: Callable[..., None]) -> None:
    frames = [(sys._getframe(), 1)]
    assert find_message(frames, PIPELINE) is None
    record(*WAITING["messages in one call"])
    found = recorded_message(PIPELINE)
    assert found is not None
    assert (str(found), found.peers) == ("recv and send over pp", (6,))
    assert found.site.endswith("step.py:3 in step")
    record(message("recv 1<-0"))
    found = recorded_message(PIPELINE)
    assert found is not None
    assert (str(found), found.peers) == ("recv over pp", (2,))
    record(*WELL["the operations of a coalesced call, which is done"])
    assert recorded_message(PIPELINE) is None
    # Nor are they listed as collectives in which a rank waits.
    assert [call.is_done for call in hang_state.recorded_calls()] == [True, True, True]


def test_an_account_of_a_rank_on_a_gpu_has_its_message(
    record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(message("recv 1<-0"))
    monkeypatch.setattr(hang_state, "group_ranks", lambda _: PIPELINE)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    taken = hang_state.take_state(6, threading.get_ident())
    assert taken.message is not None
    assert taken.waits


def test_a_world_of_gpus_is_watched_by_its_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch.Watch, "_run", lambda self: None)
    place = Place(0, 2, 0, 2, rendezvous="env://")
    with watch.watching(place, dist.HashStore(), 60, None, str, on_gpu=True) as watcher:
        assert watcher._on_gpu
