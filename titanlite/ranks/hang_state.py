"""The state of this rank for a hang report: its Python stack and the collectives it called.

torch's flight recorder records each gloo and NCCL collective with its size, dtype and Python
stack. Of gloo it does not record point-to-point (P2P) messages: those are read from the stack
frames of the waiting thread.

With gloo the main thread waits in the call of a collective, so its stack shows that. With NCCL it
waits in any operation that needs a value from the GPU, such as `.item()`, or that finds the GPU's
queue full; only the recorder shows that the GPU waits.
"""

import contextlib
import functools
import linecache
import math
import os
import pickle
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titanlite.ranks.report import Call, Message, RankState
from titanlite.ranks.stacks import CodePlace
from titanlite.ranks.turns import is_rank

# A frame with its line, or the place of one.
Located = TypeVar("Located", tuple[FrameType, int], CodePlace)

# The flight recorder's functions are missing from torch's type stubs.
c10d: Any = torch._C._distributed_c10d

# The process group of saves and loads. A background save calls its collectives from its own
# thread. The main thread waits for them only while it waits for that save.
CHECKPOINTS = "checkpoints"
# How the recorder's names of NCCL's collectives and messages start.
NCCL = "nccl:"
# How many calls per group a rank sends for the report; the trace files hold all of them.
REMEMBERED_CALLS = 100

DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
    "Char": "int8",
}
UNKNOWN = "an unknown place"
TORCH = os.path.dirname(torch.__file__) + os.sep
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
SITE_PACKAGES = os.sep + "site-packages" + os.sep
OURS = str(Path(__file__).parents[2]) + os.sep
MODULE_CALL = os.path.join("torch", "nn", "modules", "module.py")
STARTS = ("ranks/launch.py", "ranks/world.py", "ranks/watch.py", "ranks/threads.py")
SAVING = (
    os.path.join(TORCH, "distributed", "checkpoint") + os.sep,
    os.path.join(OURS, "titanlite", "checkpoint") + os.sep,
)
# Frames of these files are never reported as the place of a call.
PLUMBING = (
    os.path.join(OURS, "titanlite", "ranks") + os.sep,
    os.path.join(OURS, "titanlite", "mesh") + os.sep,
    os.path.join(OURS, "titanlite", "tools", "debug") + os.sep,
    os.path.join(OURS, "titanlite", "tools", "verify", "watching.py"),
    os.path.join(OURS, "titanlite", "tools", "torchtitan") + os.sep,
)


def take_state(
    rank: int,
    thread: int,
    *,
    axes: dict[str, str] | None = None,
    error: BaseException | None = None,
) -> RankState:
    """The state of this process, from the stack of `thread`, its main thread, or of `error`.

    `axes` maps the names of process groups to their mesh axes.
    """
    state = RankState(rank)
    frames = _frames(thread, error)
    saves = _is_saving(frames)
    state.site = call_site(places_of(reversed(frames))) or UNKNOWN
    if saves and error is None and (behind := _frames_of_save(thread)):
        # The main thread waits for the thread that saves, so report where that thread is.
        frames = behind
        state.site = call_site(places_of(reversed(frames))) or state.site
    state.stack = [show_place(*place) for place in places_of(frames)]
    if error is not None:
        state.error = f"{type(error).__name__}: {error}".splitlines()[0]
    if not dist.is_initialized():
        return state
    state.groups = group_ranks(axes or {})
    state.calls = recorded_calls(REMEMBERED_CALLS)
    for index, call in enumerate(state.calls):
        if state.groups.get(call.group, ("", ()))[0] == CHECKPOINTS:
            site = state.site if call.site == UNKNOWN else call.site
            state.calls[index] = replace(call, site=site, is_done=call.is_done or not saves)
    if not state.pending():
        state.message = find_message(frames, state.groups) or recorded_message(state.groups)
        if error is not None and state.calls and not (state.message and state.message.peers):
            # The recorder may list the failed call as completed. Take the last call from the
            # same line of code, or else the last call.
            at = [n for n, call in enumerate(state.calls) if call.site == state.site] or [-1]
            state.calls[at[-1]] = replace(state.calls[at[-1]], is_done=False)
            state.message = None
    return state


def stack_of(thread: int) -> tuple[list[str], str]:
    """The stack of a thread that does not run, innermost last, and the place of its call."""
    frames = _raw_frames(thread)
    while frames and is_plumbing(_file(frames[-1][0])):
        frames.pop()  # a debugger's own, or those of a wait
    frames = _without_start(frames)
    stack = [show_place(*place) for place in places_of(frames)]
    return stack, call_site(places_of(reversed(frames))) or UNKNOWN


def group_ranks(axes: dict[str, str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The process groups of this rank: name -> (axis, ranks)."""
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        if not isinstance(group, dist.ProcessGroup):
            continue
        label = axes.get(group.group_name) or group.group_desc.removeprefix("mesh_")
        if label == "default_pg":
            label = "the world"
        elif label == "undefined":
            label = f"group {group.group_name}"
        for name in names_of(group.group_name):
            groups[name] = (label, tuple(sorted(ranks)))
    return groups


def names_of(group: str) -> list[str]:
    """The names of a process group in a report: one per backend, since each counts its own calls.

    The gloo backend has the group's own name.
    """
    return [group, f"{group}@nccl"] if hasattr(c10d, "_dump_nccl_trace") else [group]


def recorded_calls(num_remembered: int | None = None) -> list[Call]:
    """The collectives in this rank's flight recorders, in the order of the calls.

    Only the last `num_remembered` of each group and those not completed; all if None.
    """
    if is_rank():
        # A rank that is a thread: its groups are ThreadGroups, which keep their calls themselves.
        world: Any = dist.distributed_c10d._get_default_group()
        calls: list[Call] = world.recorded_calls()
    else:
        entries = recorded_entries(with_stacks=True)
        calls = [_call_of(entry) for entry in entries if not entry["is_p2p"]]
    if num_remembered is None:
        return calls
    last = {call.group: call.number for call in calls}
    return [
        call
        for call in calls
        if call.number > last[call.group] - num_remembered or not call.is_done
    ]


def _call_of(entry: Mapping[str, Any]) -> Call:
    """The collective of an entry of a flight recorder."""
    backend, _, operation = entry["profiling_name"].partition(":")
    name = entry["process_group"][0]
    inputs = entry["input_sizes"] or entry["output_sizes"]
    dtypes = entry["input_dtypes"] or entry["output_dtypes"] or [""]
    frames = ((f["filename"], f["line"], f["name"]) for f in entry.get("frames", ()))
    return Call(
        group=name if backend == "gloo" else f"{name}@{backend}",
        number=entry["collective_seq_id"],
        operation=operation,
        num_elements=sum(math.prod(sizes) for sizes in inputs),
        dtype=DTYPES.get(dtypes[0], dtypes[0].lower()),
        site=call_site(frames) or UNKNOWN,
        is_done=entry["is_done"],
    )


def sequence_numbers() -> list[int]:
    """How many collectives and messages each process group has had so far.

    The numbers are read without a lock, which harms nothing. The flight recorder has them too, but
    only for a run that has failed: torch 2.13 reads its list of groups without a lock, and crashes
    if another thread calls the first collective of a new group meanwhile.
    """
    numbers = []
    for group in list(dist.distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup):
            counting: Any = group
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                numbers.append(counting._get_sequence_number_for_group())
    return numbers


def dump_recorders(with_stacks: bool = True) -> dict[str, bytes]:
    """The pickled flight recorders: "" for gloo, and "nccl" if torch is built with NCCL."""
    dumps = {"": c10d._dump_fr_trace(True, with_stacks, False)}
    if hasattr(c10d, "_dump_nccl_trace"):
        dumps["nccl"] = c10d._dump_nccl_trace(True, with_stacks, False)
    return dumps


def recorded_entries(*, with_stacks: bool) -> list[dict[str, Any]]:
    """The entries of all flight recorders, each with "is_done".

    With NCCL, an operation of a coalesced call has an entry that is never completed; that of the
    whole call follows it. NCCL runs the collectives of a group in order, so an entry is also done
    if a later one of its group and kind is.
    """
    entries = [
        entry
        for dump in dump_recorders(with_stacks).values()
        for entry in pickle.loads(dump).get("entries", ())
    ]
    later_done = set()
    for entry in reversed(entries):
        kind = entry["process_group"][0], entry["is_p2p"]
        entry["is_done"] = entry["retired"] or entry["state"] == "completed"
        if entry["profiling_name"].startswith(NCCL):
            if entry["is_done"]:
                later_done.add(kind)
            entry["is_done"] = kind in later_done
    return entries


def call_site(places: Iterable[tuple[str, int, str]]) -> str:
    """The innermost of `places` that is user or model code; "" if there is none.

    `places` start with the innermost frame.
    """
    for file, line, function in places:
        if not is_plumbing(file):
            return show_place(file, line, function)
    return ""


def is_overdue(places: Sequence[CodePlace], seconds: float) -> bool:
    """Whether a thread that has not moved for `seconds` is waiting for other ranks for too long.

    `places` is its stack, innermost last. The flight recorder knows the timeout of a collective; a
    P2P message of gloo has none.
    """
    if not places or not _waits(places[-1].file, places[-1].line):
        return False
    saves = any(place.file.startswith(SAVING) for place in places)
    limits = [
        entry["timeout_ms"] / 1000
        for entry in recorded_entries(with_stacks=False)
        if not entry["is_done"] and not entry["is_p2p"]
        if saves or entry["process_group"][1] != CHECKPOINTS
    ]
    return not limits or seconds > max(limits)


def gpu_is_overdue() -> bool:
    """Whether the GPU waits for other ranks for too long, whatever the main thread does.

    It does if a collective or message of NCCL has not ended within its own timeout. Only for a
    rank without any progress for that time, since this reads the flight recorder.
    """
    now = time.time_ns()
    return any(
        not entry["is_done"] and now - entry["time_created_ns"] > 1_000_000 * entry["timeout_ms"]
        for entry in recorded_entries(with_stacks=False)
        if entry["profiling_name"].startswith(NCCL)
    )


def find_message(
    frames: Sequence[tuple[FrameType, int]], groups: dict[str, tuple[str, tuple[int, ...]]]
) -> Message | None:
    """The P2P message that a thread waits for; None if it waits for none.

    `frames` are its stack, innermost last. If they do not hold the peer, all other ranks of the
    pipeline are possible peers.
    """
    if not frames or not _waits(_file(frames[-1][0]), frames[-1][1]):
        return None
    site = call_site(places_of(reversed(frames))) or UNKNOWN
    operation = "message"
    for frame, line in reversed(frames):
        name = frame.f_code.co_name
        if name in ("send", "recv", "isend", "irecv") and "distributed_c10d" in _file(frame):
            axis = _axis_of(frame.f_locals.get("group"), groups)
            return Message(name, _peer_of(frame), site, axis)
        action = frame.f_locals.get("action")
        if action is not None and type(action).__name__ == "_Action":
            operation = f"message of the pipeline's {action}"
        if operations := _operations(frame, line):
            kinds = sorted({operation.op.__name__.lstrip("i") for operation in operations})
            peers = sorted({operation.peer for operation in operations})
            axes = sorted({_axis_of(operation.group, groups) for operation in operations})
            return Message(" and ".join(kinds), tuple(peers), site, " and ".join(axes))
    own = dist.get_rank()
    pipelines = ((axis, ranks) for axis, ranks in groups.values() if axis.split()[0] == "pp")
    axis, stages = next(pipelines, ("", ()))
    return Message(operation, tuple(rank for rank in stages if rank != own), site, axis)


def recorded_message(groups: dict[str, tuple[str, tuple[int, ...]]]) -> Message | None:
    """The P2P messages that the GPU waits for, as one; None if it waits for none.

    Those of one group, the first that has any. NCCL names them "nccl:send 0->1" and
    "nccl:recv 1<-0", by ranks of the group.
    """
    waiting = [
        entry
        for entry in recorded_entries(with_stacks=True)
        if entry["is_p2p"] and not entry["is_done"] and entry["profiling_name"].startswith(NCCL)
    ]
    if not waiting:
        return None
    found = []
    for entry in waiting:
        match = re.fullmatch(r"(send|recv) \d+(?:->|<-)(\d+)", entry["profiling_name"][len(NCCL) :])
        if match and entry["process_group"] == waiting[0]["process_group"]:
            found.append((match[1], int(match[2])))
    axis, ranks = groups.get(waiting[0]["process_group"][0], ("", ()))
    frames = ((f["filename"], f["line"], f["name"]) for f in waiting[0].get("frames", ()))
    peers = sorted({ranks[place] for _, place in found if place < len(ranks)})
    kinds = " and ".join(sorted({kind for kind, _ in found})) or "message"
    return Message(kinds, tuple(peers), call_site(frames) or UNKNOWN, axis)


def show_stacks() -> str:
    """The Python stacks of all threads, in the interpreter's format."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}, innermost last:\n{stack}")
    return "\n".join(parts)


def show_stack(places: list[CodePlace]) -> list[str]:
    """A stack, innermost last, each frame `file:line in function`."""
    return [show_place(*place) for place in _without_start(places)]


def show_place(file: str, line: int, function: str) -> str:
    """A place in the code as text, with the shortened name of its file."""
    return f"{shorten(file)}:{line} in {function}"


def shorten(file: str) -> str:
    """The file's path relative to the project, to torch or to the working directory."""
    for folder, start in ((OURS, ""), (TORCH, "torch" + os.sep), (os.getcwd() + os.sep, "")):
        if file.startswith(folder) and SITE_PACKAGES not in file[len(folder) :]:
            return start + file[len(folder) :]
    return file


def _frames(thread: int, error: BaseException | None) -> list[tuple[FrameType, int]]:
    """Frames and lines, innermost last, of `error` or a thread that does not run (stacks.py)."""
    if error is not None and error.__traceback__ is not None:
        return _without_start(list(traceback.walk_tb(error.__traceback__)))
    return _without_start(_raw_frames(thread))


def _raw_frames(thread: int) -> list[tuple[FrameType, int]]:
    frame = sys._current_frames().get(thread)
    return list(traceback.walk_stack(frame))[::-1] if frame is not None else []


def _without_start(frames: list[Located]) -> list[Located]:
    """`frames` without those that started the rank and those of nn.Module.__call__."""
    files = [first if isinstance(first, str) else _file(first) for first, *_ in frames]
    starts = [index for index, file in enumerate(files) if file.endswith(STARTS)]
    started = list(zip(frames, files, strict=True))[starts[-1] + 1 if starts else 0 :]
    return [frame for frame, file in started if not file.endswith(MODULE_CALL)] or frames


def _is_saving(frames: Sequence[tuple[FrameType, int]]) -> bool:
    return any(_file(frame).startswith(SAVING) for frame, _ in frames)


def _frames_of_save(main: int) -> list[tuple[FrameType, int]]:
    """The frames of the thread of a background save; empty if there is none."""
    for thread in sys._current_frames():
        if thread != main and _is_saving(frames := _frames(thread, None)):
            return frames
    return []


def _waits(file: str, line: int) -> bool:
    if file.startswith(os.path.join(TORCH, "distributed") + os.sep):
        return True
    return ".wait(" in linecache.getline(file, line) and not file.startswith(STANDARD_LIBRARY)


def _operations(frame: FrameType, line: int) -> list[dist.P2POp]:
    """The P2POps among a frame's locals: those named in its current line, or else all."""
    found = {name: _messages_in(value) for name, value in frame.f_locals.items()}
    found = {name: messages for name, messages in found.items() if messages}
    words = set(re.findall(r"\w+", linecache.getline(_file(frame), line)))
    spoken = [message for name in found if name in words for message in found[name]]
    return spoken or [message for messages in found.values() for message in messages]


def _messages_in(value: Any) -> list[dist.P2POp]:
    if isinstance(value, dist.P2POp):
        return [value]
    if isinstance(value, list):
        return [item for item in value if isinstance(item, dist.P2POp)]
    operations = getattr(value, "operations", None) if "titanlite" in type(value).__module__ else ()
    return _messages_in(operations) if isinstance(operations, list) else []


def _peer_of(frame: FrameType) -> tuple[int, ...]:
    names = frame.f_locals
    for whole, within in (("dst", "group_dst"), ("src", "group_src")):
        if isinstance(names.get(whole), int):
            return (names[whole],)
        if isinstance(names.get(within), int) and names.get("group") is not None:
            return (dist.get_global_rank(names["group"], names[within]),)
    return ()


def _axis_of(group: Any, groups: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    """The axis of a process group; None means the default group."""
    own = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    return groups.get(getattr(own, "group_name", ""), ("", ()))[0]


def places_of(frames: Iterable[tuple[FrameType, int]]) -> Iterator[tuple[str, int, str]]:
    """File, line and function of each frame."""
    for frame, line in frames:
        yield _file(frame), line, frame.f_code.co_name


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


@functools.cache
def is_plumbing(file: str) -> bool:
    """Whether a file's frames are never reported as the place of a call."""
    # The file names of generated code differ between ranks.
    if file.startswith((TORCH, "<", *PLUMBING)) or "torchinductor" in file:
        return True
    # torch 2.14 wraps what it deprecates in a function of typing_extensions.
    return is_standard(file) or file.endswith(os.sep + "typing_extensions.py")


def is_standard(file: str) -> bool:
    """Whether a file is of Python's standard library; packages may be installed inside of it."""
    return file.startswith(STANDARD_LIBRARY) and SITE_PACKAGES not in file
