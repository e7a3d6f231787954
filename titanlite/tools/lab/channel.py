"""Channels: links that send tensors and count every message.

A message between two devices is a send and a receive of gloo (of NCCL on GPUs). A message between
the host and a device goes through the pipe that the launcher opened. A tensor on the meta device
has a shape but no data: its messages are counted but not sent, so a program can be counted at sizes
that do not fit into memory. On a slow link (link.py) messages between devices are delayed.
"""

import pickle
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from titanlite import pickles
from titanlite.pickles import Pickler, loads
from titanlite.tools.lab.counts import Counts
from titanlite.tools.lab.link import Port, sleep_until
from titanlite.tools.lab.record import RECEIVE, SEND
from titanlite.tools.lab.recorder import Recorder


class Transfer:
    """A message in flight. After `wait`, the tensor may be used (receive) or reused (send)."""

    def __init__(
        self,
        work: Any,
        tensor: torch.Tensor,
        unfinished: "set[Transfer]",
        end: Callable[[], float] | None = None,
    ) -> None:
        self._work = work
        self._tensor = tensor
        self._unfinished = unfinished
        # On a slow link: the time at which the transfer ends. Known only after the work is done.
        self._end = end
        # If a send's Work object is garbage collected, gloo drops the send and the receiver hangs.
        unfinished.add(self)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._end is not None:
            sleep_until(self._end())
            self._end = None
        self._unfinished.discard(self)


class VirtualChannel(Protocol):
    """One end of a two-way link that keeps the order of its messages."""

    def send(self, tensor: torch.Tensor) -> None: ...

    def recv(self, into: torch.Tensor) -> torch.Tensor: ...


class DeviceChannel(VirtualChannel):
    """The link from this device to the device with rank `peer`.

    As in torch.distributed, both sides know shape and dtype: the receiver passes the tensor to
    fill. With a `port`, messages take as long as on its link.
    """

    def __init__(
        self, peer: int, counts: Counts, recorder: Recorder, port: Port | None = None
    ) -> None:
        self.peer = peer
        self._port = port
        self._counts = counts
        self._recorder = recorder
        self._unfinished: set[Transfer] = set()

    def isend(self, tensor: torch.Tensor) -> Transfer:
        """Start sending; do not modify the tensor before `wait` returns."""
        if tensor.is_meta:
            self._counts.count_send(tensor)
        tensor = tensor.detach().contiguous()
        if not tensor.numel() or tensor.is_meta:
            return self._without_data(SEND, tensor)
        end = self._departure(tensor.nbytes) if self._port else None
        return Transfer(dist.isend(tensor, self.peer), tensor, self._unfinished, end)

    def irecv(self, into: torch.Tensor) -> Transfer:
        """Start receiving into a contiguous tensor; it is filled when `wait` returns."""
        if not into.numel() or into.is_meta:
            return self._without_data(RECEIVE, into)
        end = self._arrival(into.nbytes) if self._port else None
        return Transfer(dist.irecv(into, self.peer), into, self._unfinished, end)

    def _without_data(self, kind: str, tensor: torch.Tensor) -> Transfer:
        # The messages of torch.distributed are recorded when they are dispatched.
        self._recorder.message(kind, self.peer, tensor)
        return Transfer(None, tensor, self._unfinished)

    def send(self, tensor: torch.Tensor) -> None:
        """Send and wait. Two devices that both send to each other before they receive can hang."""
        self.isend(tensor).wait()

    def recv(self, into: torch.Tensor) -> torch.Tensor:
        """Receive, wait, and return the filled tensor."""
        self.irecv(into).wait()
        return into

    def _departure(self, num_bytes: int) -> Callable[[], float]:
        """Tell the receiver when the message leaves; the result says when it has left."""
        assert self._port is not None
        start, end = self._port.send(num_bytes)
        stamp = torch.tensor([start], dtype=torch.float64)
        with _disable_current_modes():  # The time stamp is not a message of the program.
            sending = Transfer(dist.isend(stamp, self.peer), stamp, self._unfinished)

        def left() -> float:
            sending.wait()
            return end

        return left

    def _arrival(self, num_bytes: int) -> Callable[[], float]:
        port, posted = self._port, time.monotonic()
        assert port is not None
        stamp = torch.empty(1, dtype=torch.float64)
        with _disable_current_modes():
            work: Any = dist.irecv(stamp, self.peer)

        def end() -> float:
            work.wait()
            return port.receive(stamp.item(), posted, num_bytes)

        return end


class HostChannel(VirtualChannel):
    """The link between the host and one device. `send` copies and does not wait for the receiver.

    A device's sends are counted as device to host, its receives as host to device.
    """

    def __init__(
        self, post: Callable[[bytes], None], take: Callable[[], bytes], counts: Counts | None = None
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


class _Pickler(Pickler):
    def reducer_override(self, value: Any) -> Any:
        # A shard is a view; pickling it directly would include the storage of the whole tensor.
        if type(value) is torch.Tensor:
            copy = torch.empty_like(value, memory_format=torch.contiguous_format)
            copy.copy_(value.detach())
            return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """Serialize any value, including functions from a notebook; tensors lose their graph."""
    return pickles.dumps(value, _Pickler)
