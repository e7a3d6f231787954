"""Communicators: how the parallelisms built by hand start a collective or a message and wait later.

TorchCommunicator uses torch.distributed. ChannelCommunicator uses the channels of a virtual device
and the lab's collectives, so every message is counted and can be delayed by a slow link. Both run
collectives in the order in which they were started, while the device computes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist

from titanlite.tools.lab.device import VirtualDevice


class Pending(Protocol):
    """Communication in progress. Before `wait` returns, its tensors must not be used."""

    def wait(self) -> Any: ...


class Communicator(Protocol):
    """Non-blocking communication among `size` ranks, of which this one is `rank`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Replace `tensor` by the sum over all ranks."""

    def all_gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Fill parts[r] with the tensor of rank r."""

    def reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> Pending:
        """Fill `output` with the sum of every rank's parts[rank]."""

    def isend(self, tensor: torch.Tensor, target: int) -> Pending:
        """Send `tensor`, which must not change before `wait` returns."""

    def irecv(self, into: torch.Tensor, source: int) -> Pending:
        """Receive into a contiguous tensor."""


class TorchCommunicator:
    """The collectives and messages of torch.distributed, in `group` (by default, all ranks).

    Messages are addressed by global rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return _started(dist.all_reduce(tensor, group=self._group, async_op=True))

    def all_gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> Pending:
        return _started(dist.all_gather(list(parts), tensor, group=self._group, async_op=True))

    def reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> Pending:
        return _started(dist.reduce_scatter(output, list(parts), group=self._group, async_op=True))

    def isend(self, tensor: torch.Tensor, target: int) -> Pending:
        return _started(dist.isend(tensor, target))

    def irecv(self, into: torch.Tensor, source: int) -> Pending:
        return _started(dist.irecv(into, source))


def _started(work: Any) -> Pending:
    # torch returns None to a rank outside the group, which no rank here is.
    assert work is not None
    return work


class ChannelCommunicator:
    """The lab's own collectives over the channels of `device`, run one by one in a thread.

    The thread is to the device what NCCL's stream is to a GPU. Use it as a context manager, which
    ends the thread. All ranks must start the same collectives in the same order.
    """

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, f"communication of rank {device.rank}")

    def __enter__(self) -> "ChannelCommunicator":
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        # After an error, other ranks may never take part in what the thread waits for.
        self._thread.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def rank(self) -> int:
        return self._device.rank

    @property
    def size(self) -> int:
        return self._device.mesh.size

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self._start(lambda: tensor.copy_(self._device.all_reduce(tensor)))

    def all_gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> Pending:
        def gather() -> None:
            for part, gathered in zip(parts, self._device.all_gather_parts(tensor), strict=True):
                part.copy_(gathered)

        return self._start(gather)

    def reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> Pending:
        stacked = torch.stack(list(parts))
        return self._start(lambda: output.copy_(self._device.reduce_scatter(stacked)[0]))

    def isend(self, tensor: torch.Tensor, target: int) -> Pending:
        return self._device.channel(target).isend(tensor)

    def irecv(self, into: torch.Tensor, source: int) -> Pending:
        return self._device.channel(source).irecv(into)

    def _start(self, collective: Callable[[], Any]) -> Pending:
        def counted() -> None:
            # Dispatch modes and gradient modes are per thread.
            with torch.no_grad(), self._device.counting():
                collective()

        return _InThread(self._thread.submit(counted))


class _InThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait for the collective; raise its error."""
        self._future.result()


def over_channels(main: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`main(rank, world_size, *args)` as a job that communicates over the cluster's channels.

    cluster.run(over_channels(data_parallelism_main, overlap=True), data, 8, 5, link=slow)
    """

    def on_device(device: VirtualDevice, *args: Any) -> Any:
        with ChannelCommunicator(device) as communicator:
            return main(device.rank, device.mesh.size, *args, communicator=communicator, **options)

    return on_device
