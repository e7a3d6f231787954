"""Naive collectives: each message is sent directly to the device that needs it.

This is the simplest form of each collective, and the reference for the others. Each function runs
on every device of the group; in one call, tensors have the same shape on all devices. Every device
adds in group order, so all results are bitwise equal.
"""

from collections.abc import Sequence

import torch

from titanlite.tools.lab.channel import Transfer
from titanlite.tools.lab.group import Group, wait_all


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """The root's tensor, on every device; other devices pass `tensor` only for its shape."""
    if group.rank != root:
        return group.recv(tensor, root)
    wait_all([group.isend(tensor, peer) for peer in group.peers])
    return tensor.clone()


def scatter(group: Group, tensors: Sequence[torch.Tensor], root: int = 0) -> torch.Tensor:
    """The root's tensors[r], on device r; other devices pass `tensors` only for their shapes."""
    if group.rank != root:
        return group.recv(tensors[group.rank], root)
    wait_all([group.isend(tensors[peer], peer) for peer in group.peers])
    return tensors[root].clone()


def gather(group: Group, tensor: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
    """Every device's tensor, in group order, on the root; None elsewhere."""
    if group.rank != root:
        group.send(tensor, root)
        return None
    return [
        tensor.clone() if peer == root else group.recv(tensor, peer) for peer in range(group.size)
    ]


def reduce(group: Group, tensor: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """The sum of every device's tensor on the root; None elsewhere."""
    tensors = gather(group, tensor, root)
    return None if tensors is None else added(tensors)


def all_scatter(group: Group, tensor: torch.Tensor) -> list[Transfer]:
    """Start sending this device's tensor to every peer: the sending half of an all-gather.

    A peer receives it with `group.recv(like, rank)`. Wait for the transfers only after receiving:
    if all devices wait for their sends first, large messages deadlock.
    """
    return [group.isend(tensor, peer) for peer in group.peers]


def all_gather(group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every device's tensor, in group order, on every device."""
    sending = all_scatter(group, tensor)
    gathered = [
        tensor.clone() if rank == group.rank else group.recv(tensor, rank)
        for rank in range(group.size)
    ]
    wait_all(sending)
    return gathered


def all_reduce(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of every device's tensor, on every device."""
    return added(all_gather(group, tensor))


def reduce_scatter(group: Group, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over the devices of their tensors[r], on device r."""
    return added(all_to_all(group, tensors))


def all_to_all(group: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """tensors[r] of every device, in group order, on device r: a transpose across devices."""
    sending = [group.isend(tensors[peer], peer) for peer in group.peers]
    mine = tensors[group.rank]
    received = [
        mine.clone() if rank == group.rank else group.recv(mine, rank) for rank in range(group.size)
    ]
    wait_all(sending)
    return received


def barrier(group: Group) -> None:
    """Block until all devices have called it: one-byte tokens go to the first device and back."""
    token = torch.zeros(1, dtype=torch.uint8)
    gather(group, token)
    broadcast(group, token)


def added(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(tensors[1:], tensors[0])
