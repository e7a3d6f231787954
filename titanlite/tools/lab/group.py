"""Group: the devices of one collective, with this device's position and its channels."""

from collections.abc import Sequence

import torch

from titanlite.tools.lab.channel import DeviceChannel, Transfer


class Group:
    """This device's view of a group: `rank` is its position, `size` the number of devices.

    Peers are addressed by their position in the group, modulo its size, so `rank + 1` is the next
    device on a ring.
    """

    def __init__(self, rank: int, channels: Sequence[DeviceChannel]) -> None:
        self.rank = rank
        self.size = len(channels)
        self._channels = channels

    @property
    def peers(self) -> list[int]:
        """All positions except this device's own, starting with the next device."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def isend(self, tensor: torch.Tensor, to: int) -> Transfer:
        return self._channels[to % self.size].isend(tensor)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._channels[to % self.size].send(tensor)

    def irecv(self, into: torch.Tensor, source: int) -> Transfer:
        return self._channels[source % self.size].irecv(into)

    def recv(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into a new tensor with the shape and dtype of `like`."""
        return self._channels[source % self.size].recv(new_like(like))

    def shift(self, tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """Send to the next device of the ring while receiving from the previous one.

        `like` gives the shape to receive if it differs from the shape of `tensor`. The send must be
        asynchronous: blocking sends would deadlock the ring.
        """
        sending = self.isend(tensor, self.rank + 1)
        received = self.recv(tensor if like is None else like, self.rank - 1)
        sending.wait()
        return received


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def wait_all(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
