"""Links along which tensors travel, and on which every message is counted.

Between two devices a message is gloo's (on GPUs NCCL's) send and receive; between the host and a
device it goes through the pipe that the launcher opened. A tensor on the meta device has a shape
and no data: its messages are counted and nothing moves, so that a program can be counted at sizes
that no laptop could hold.
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


class Transfer:
    """A message under way; the tensor may be used, or used again, after `wait`."""

    def __init__(self, work: Any, tensor: torch.Tensor, unfinished: set[Transfer]) -> None:
        self._work = work
        self._tensor = tensor
        self._unfinished = unfinished
        # gloo gives up a send whose Work object is gone, and the receiver waits for ever.
        unfinished.add(self)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._unfinished.discard(self)


class VirtualChannel(Protocol):
    """A two-way link that keeps the order of its messages; the other side holds the other end."""

    def send(self, tensor: torch.Tensor) -> None: ...

    def recv(self, into: torch.Tensor) -> torch.Tensor: ...


class DeviceChannel(VirtualChannel):
    """The link from this device to another device, by its rank.

    Both sides know shape and dtype: the receiver gives the tensor to fill, as in torch.distributed.
    """

    def __init__(self, peer: int, counts: Counts) -> None:
        self.peer = peer
        self.num_sent = 0
        self.num_received = 0
        self._counts = counts
        self._unfinished: set[Transfer] = set()

    def isend(self, tensor: torch.Tensor) -> Transfer:
        """Start sending; the tensor must stay as it is until `wait` returns."""
        self.num_sent += 1
        if tensor.is_meta:
            self._counts.count_send(tensor)
        tensor = tensor.detach().contiguous()
        moves = not tensor.is_meta and tensor.numel()
        work = dist.isend(tensor, self.peer) if moves else None
        return Transfer(work, tensor, self._unfinished)

    def irecv(self, into: torch.Tensor) -> Transfer:
        """Start receiving into a contiguous tensor, which is filled when `wait` returns."""
        self.num_received += 1
        moves = not into.is_meta and into.numel()
        work = dist.irecv(into, self.peer) if moves else None
        return Transfer(work, into, self._unfinished)

    def send(self, tensor: torch.Tensor) -> None:
        """Send and wait. Two devices that both send first and receive then may wait for ever."""
        self.isend(tensor).wait()

    def recv(self, into: torch.Tensor) -> torch.Tensor:
        """Receive, wait, and return the tensor that was filled."""
        self.irecv(into).wait()
        return into


class HostChannel(VirtualChannel):
    """The link between the host and one device. `send` copies and does not wait for the receiver.

    What a device sends is counted as device to host, what it receives as host to device.
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
        """Wait for the next tensor; shape and dtype come with it, so `into` is not needed."""
        tensor = loads(self._take())
        if self._counts:
            self._counts.count_h2d([tensor])
        return tensor if into is None else into.copy_(tensor)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # A shard is a view: pickled as it is, it would take the whole tensor's storage along.
        if type(value) is torch.Tensor:
            copy = torch.empty_like(value, memory_format=torch.contiguous_format)
            copy.copy_(value.detach())
            return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """Bytes of any value: functions defined in a notebook too, tensors without their graph."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def loads(message: bytes) -> Any:
    return cloudpickle.loads(message)
