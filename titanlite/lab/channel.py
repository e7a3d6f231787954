"""Channels: links that send tensors and count every message.

A message between two devices is a send and a receive of gloo (of NCCL on GPUs). A message between
the host and a device goes through the pipe that the launcher opened. A tensor on the meta device
has a shape but no data: its messages are counted but not sent, so a program can be counted at sizes
that do not fit into memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist

from titanlite.lab.counts import Counts
from titanlite.lab.record import RECEIVE, SEND
from titanlite.lab.recorder import Recorder


class Transfer:
    """A message in flight. After `wait`, the tensor may be used (receive) or reused (send)."""

    def __init__(self, work: Any, tensor: torch.Tensor, unfinished: set[Transfer]) -> None:
        self._work = work
        self._tensor = tensor
        self._unfinished = unfinished
        # If a send's Work object is garbage collected, gloo drops the send and the receiver hangs.
        unfinished.add(self)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._unfinished.discard(self)


class VirtualChannel(Protocol):
    """One end of a two-way link that keeps the order of its messages."""

    def send(self, tensor: torch.Tensor) -> None: ...

    def recv(self, into: torch.Tensor) -> torch.Tensor: ...


class DeviceChannel(VirtualChannel):
    """The link from this device to the device with rank `peer`.

    As in torch.distributed, both sides know shape and dtype: the receiver passes the tensor to
    fill.
    """

    def __init__(self, peer: int, counts: Counts, recorder: Recorder) -> None:
        self.peer = peer
        self._counts = counts
        self._recorder = recorder
        self._unfinished: set[Transfer] = set()

    def isend(self, tensor: torch.Tensor) -> Transfer:
        """Start sending; do not modify the tensor before `wait` returns."""
        if tensor.is_meta:
            self._counts.count_send(tensor)
        tensor = tensor.detach().contiguous()
        return self._start(SEND, dist.isend, tensor)

    def irecv(self, into: torch.Tensor) -> Transfer:
        """Start receiving into a contiguous tensor; it is filled when `wait` returns."""
        return self._start(RECEIVE, dist.irecv, into)

    def _start(
        self, kind: str, start: Callable[[torch.Tensor, int], Any], tensor: torch.Tensor
    ) -> Transfer:
        if tensor.is_meta or not tensor.numel():
            # Nothing moves. What torch does send is recorded when it is dispatched.
            self._recorder.message(kind, self.peer, tensor)
            return Transfer(None, tensor, self._unfinished)
        return Transfer(start(tensor, self.peer), tensor, self._unfinished)

    def send(self, tensor: torch.Tensor) -> None:
        """Send and wait. Two devices that both send to each other before they receive can hang."""
        self.isend(tensor).wait()

    def recv(self, into: torch.Tensor) -> torch.Tensor:
        """Receive, wait, and return the filled tensor."""
        self.irecv(into).wait()
        return into


class HostChannel(VirtualChannel):
    """The link between the host and one device. `send` copies and does not wait for the receiver.

    A device's sends are counted as device to host, its receives as host to device.
    """

    def __init__(
        self,
        post: Callable[[bytes], None],
        take: Callable[[], bytes],
        counts: Counts | None = None,
    ) -> None:
        self._post = post
        self._take = take
        self._counts = counts

    def send(self, tensor: torch.Tensor) -> None:
        if self._counts:
            self._counts.count_d2h([tensor])
        self._post(dumps(tensor))

    def recv(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the next tensor. The message includes shape and dtype; `into` is optional."""
        tensor = loads(self._take())
        if self._counts:
            self._counts.count_h2d([tensor])
        return tensor if into is None else into.copy_(tensor)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # A shard is a view; pickling it directly would include the storage of the whole tensor.
        if type(value) is torch.Tensor:
            copy = torch.empty_like(value, memory_format=torch.contiguous_format)
            copy.copy_(value.detach())
            return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """Serialize any value, including functions from a notebook; tensors lose their graph."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def loads(message: bytes) -> Any:
    return cloudpickle.loads(message)
