"""Recorder: writes the communication events of one device into its log, for record.py.

A dispatch mode calls it, and counts. It is below autograd and torch.distributed, so it sees all
that a device runs: matrix products, and the messages and collectives of torch.distributed as well
as those of the virtual device. An event is written before the device can block on it, in one system
call, so the log of a hung device is complete. It takes 2 to 5 microseconds.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from titanlite.tools.lab import record
from titanlite.tools.lab.counts import KINDS, Counts, tensors_in
from titanlite.tools.lab.link import sleep_until

# Values are recorded for tensors of at most this many elements.
MOST_VALUES = 64
LIBRARIES = tuple(
    str(Path(module.__file__).parent) + os.sep  # type: ignore[arg-type]
    for module in (torch, sys.modules["titanlite"], contextlib)
)
EXERCISES = str(Path(__file__).parent / "exercises") + os.sep


class Recorder:
    """The log of one device in one run. With `keeps_values`, it also has the values of tensors.

    `start` is the time, by `time.monotonic`, from which the seconds of events are counted.
    """

    def __init__(self, path: Path, rank: int, start: float, keeps_values: bool) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._rank = rank
        self._start = start
        self._keeps_values = keeps_values
        self._numbers = itertools.count(1)
        # The open blocks of each thread, and its number: the thread that runs the job is 0.
        self._blocks: dict[int, list[tuple[int, str]]] = {threading.get_ident(): []}
        # Keeps the Work objects alive, so that each stays the same Python object until its wait.
        self._works: dict[int, tuple[Any, int]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record the waits inside; this replaces `wait` of torch's Work in this process."""
        own_wait = Work.wait

        def wait(work: Any, *args: Any, **options: Any) -> Any:
            _, number = self._works.pop(id(work), (None, None))
            if number is None:
                return own_wait(work, *args, **options)
            self._write(record.WAIT, number)
            result = own_wait(work, *args, **options)
            self._write(record.RESUME, number)
            return result

        Work.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield
            self._write(record.RETURN, next(self._numbers))
        finally:
            Work.wait = own_wait  # type: ignore[method-assign]
            self._works.clear()
            os.close(self._file)

    @contextlib.contextmanager
    def collective(
        self, name: str, label: str, ranks: tuple[int, ...], tensor: torch.Tensor | None
    ) -> Iterator[None]:
        """A collective of the virtual device. `tensor` has the same shape on all of its ranks."""
        number = next(self._numbers)
        self._write(record.BEGIN, number, name, label, ranks, "", tensor)
        yield
        self._write(record.END, number, name, label, ranks)

    def message(self, kind: str, peer: int, tensor: torch.Tensor, channel: str = "") -> int:
        """A send or a receive; returns the number of its event."""
        number = next(self._numbers)
        self._write(kind, number, "", "", (peer,), channel, tensor)
        return number

    def block(self, func: Any, args: Any) -> None:
        """A call of the profiler, which begins or ends a block with a name."""
        blocks = self._blocks.setdefault(threading.get_ident(), [])
        if func._opname == "_record_function_enter_new":
            # torch names blocks of its own: "Optimizer.step#AdamW.step".
            is_own = args[0].startswith("Optimizer.")
            block = args[0].rpartition(".")[2] if is_own else args[0]
            blocks.append((next(self._numbers), block))
            if block != "zero_grad":
                self._write(record.ENTER, *blocks[-1])
        elif func._opname == "_record_function_exit" and blocks:
            number, block = blocks.pop()
            if block != "zero_grad":
                self._write(record.LEAVE, number, block)

    def communication(self, func: Any, args: Any) -> int | None:
        """A call of torch.distributed that is about to run; its number, if it is recorded."""
        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if boxed is None:
            return None
        group: Any = ProcessGroup.unbox(boxed)
        ranks = tuple(dist.get_process_group_ranks(group))
        name = func._opname.strip("_")
        if name in ("send", "recv"):
            _, _, peer, tag = args
            kind = record.SEND if name == "send" else record.RECEIVE
            default: Any = dist.group.WORLD
            is_default = group.group_name == default.group_name and not tag
            channel = "" if is_default else f"{group.group_name} {tag}"
            return self.message(kind, ranks[peer], args[0][0], channel)
        kind = KINDS.get(name, "")
        if not kind:
            return None
        number = next(self._numbers)
        tensor = (
            None if kind == "barrier" else min(tensors_in(args[:2]), key=lambda one: one.nbytes)
        )
        self._write(record.COLLECTIVE, number, kind, "", ranks, group.group_name, tensor)
        return number

    def started(self, number: int, result: Any) -> None:
        """The operation `number` has started; `result` is what torch returned for it."""
        work = Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)
        self._works[id(work)] = (work, number)

    def _write(
        self,
        kind: str,
        number: int,
        name: str = "",
        label: str = "",
        peers: tuple[int, ...] = (),
        channel: str = "",
        tensor: torch.Tensor | None = None,
    ) -> None:
        info = record.NO_TENSOR
        if tensor is not None:
            # A tensor to receive into has no values yet.
            is_kept = self._keeps_values and kind != record.RECEIVE and not tensor.is_meta
            is_kept = is_kept and tensor.numel() <= MOST_VALUES
            info = record.TensorInfo.of(
                tensor, tuple(tensor.flatten().tolist()) if is_kept else None
            )
        where = _caller() if peers else ""
        blocks = self._blocks.setdefault(threading.get_ident(), [])
        if peers and not label and blocks:
            label = blocks[-1][1]
        seconds = time.monotonic() - self._start
        thread = list(self._blocks).index(threading.get_ident())
        what = (number, name, label, peers, channel, info, where, thread)
        os.write(self._file, record.packed(record.Event(self._rank, seconds, kind, *what)))


def _caller() -> str:
    """The innermost line outside torch and titanlite, as file:line; empty if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(LIBRARIES) or path.startswith(EXERCISES):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class CountingMode(TorchDispatchMode):
    """Counts the operations inside its `with` block into `counts`, and tells the recorder of them.

    It also delays matrix products, convolutions and attention to at most `flops_per_second`. Sends
    of a tensor on the meta device never reach torch; the channel counts and records them.
    """

    def __init__(
        self, counts: Counts, recorder: Recorder, flops_per_second: float = math.inf
    ) -> None:
        super().__init__()
        self.counts = counts
        self.recorder = recorder
        self.flops_per_second = flops_per_second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start, number = time.monotonic(), None
        if func.namespace == "profiler":
            self.recorder.block(func, args)
        elif func.namespace == "c10d":
            number = self.recorder.communication(func, args)
        result = func(*args, **kwargs)
        if number is not None:
            self.recorder.started(number, result)
        packet = func._overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            self.counts.flops += flops
            sleep_until(start + flops / self.flops_per_second)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname.strip("_"), args, result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        if name == "send":
            self.counts.count_send(args[0][0])
        elif name in KINDS:
            # The output is an argument of some forms and the return value of others.
            sides = map(tensors_in, (*args[:2], result))
            num_bytes = max(sum(tensor.nbytes for tensor in side) for side in sides)
            self.counts.torch_collectives[KINDS[name]] += 1
            self.counts.torch_collective_bytes[KINDS[name]] += num_bytes
