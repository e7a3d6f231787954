"""Recorder: writes the communication events of one device into its log, for record.py.

It is part of the dispatch mode that counts, so it sees messages of torch.distributed as well as
those of the virtual device. An event is written before the device can block on it, in one system
call, so the log of a hung device is complete. It takes 2 to 5 microseconds.
"""

from __future__ import annotations

import contextlib
import itertools
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

from titanlite.tools.lab.counts import KINDS, Listener, tensors_in
from titanlite.tools.lab.record import (
    BEGIN,
    COLLECTIVE,
    END,
    ENTER,
    LEAVE,
    RECEIVE,
    RESUME,
    RETURN,
    SEND,
    WAIT,
    packed,
)

# Values are recorded for tensors of at most this many elements.
MOST_VALUES = 64
LIBRARIES = tuple(
    str(Path(module.__file__).parent) + os.sep  # type: ignore[arg-type]
    for module in (torch, sys.modules["titanlite"], contextlib)
)
EXERCISES = str(Path(__file__).parent / "exercises") + os.sep


class Recorder(Listener):
    """The log of one device in one run. With `keeps_values`, it also has the values of tensors."""

    def __init__(self, path: Path, keeps_values: bool = False) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
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
            with self.waiting(number):
                return own_wait(work, *args, **options)

        Work.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield
            self._write(RETURN, next(self._numbers))
        finally:
            Work.wait = own_wait  # type: ignore[method-assign]
            self._works.clear()
            os.close(self._file)

    @contextlib.contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        self._write(WAIT, number)
        yield
        self._write(RESUME, number)

    @contextlib.contextmanager
    def collective(
        self, name: str, label: str, ranks: tuple[int, ...], tensor: torch.Tensor | None
    ) -> Iterator[None]:
        """A collective of the virtual device. `tensor` has the same shape on all of its ranks."""
        number = next(self._numbers)
        self._write(BEGIN, number, name, label, ranks, "", tensor)
        yield
        self._write(END, number, name, label, ranks)

    def message(self, kind: str, peer: int, tensor: torch.Tensor, channel: str = "") -> int:
        """A send or a receive; returns the number of its event."""
        number = next(self._numbers)
        self._write(kind, number, "", "", (peer,), channel, tensor)
        return number

    def dispatched(self, func: Any, args: Any) -> int | None:
        """An operation of torch that is about to run; its number if it is communication."""
        name = func._opname
        if func.namespace == "profiler":
            blocks = self._blocks.setdefault(threading.get_ident(), [])
            if name == "_record_function_enter_new":
                # torch names blocks of its own: "Optimizer.step#AdamW.step".
                is_own = args[0].startswith("Optimizer.")
                block = args[0].rpartition(".")[2] if is_own else args[0]
                blocks.append((next(self._numbers), block))
                if block != "zero_grad":
                    self._write(ENTER, *blocks[-1])
            elif name == "_record_function_exit" and blocks:
                number, block = blocks.pop()
                if block != "zero_grad":
                    self._write(LEAVE, number, block)
            return None
        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if boxed is None:
            return None
        group: Any = ProcessGroup.unbox(boxed)
        ranks = tuple(dist.get_process_group_ranks(group))
        name = name.strip("_")
        if name in ("send", "recv"):
            _, _, peer, tag = args
            kind = SEND if name == "send" else RECEIVE
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
        self._write(COLLECTIVE, number, kind, "", ranks, group.group_name, tensor)
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
        # A tensor to receive into has no values yet.
        info = (
            None if tensor is None else self._info(tensor, self._keeps_values and kind != RECEIVE)
        )
        where = _caller() if peers else ""
        blocks = self._blocks.setdefault(threading.get_ident(), [])
        if peers and not label and blocks:
            label = blocks[-1][1]
        values = (time.monotonic(), kind, number, name, label, peers, channel, info, where)
        thread = list(self._blocks).index(threading.get_ident())
        os.write(self._file, packed(*values, thread))

    def _info(self, tensor: torch.Tensor, with_values: bool) -> tuple[Any, ...]:
        values = None
        if with_values and not tensor.is_meta and tensor.numel() <= MOST_VALUES:
            values = tuple(tensor.detach().flatten().tolist())
        dtype = str(tensor.dtype).removeprefix("torch.")
        return dtype, tuple(tensor.shape), tensor.nbytes, values


def _caller() -> str:
    """The innermost line outside torch and titanlite, as file:line; empty if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(LIBRARIES) or path.startswith(EXERCISES):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
