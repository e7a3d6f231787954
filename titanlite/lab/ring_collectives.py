"""The same collectives on a ring: every device sends to the next one only.

All W links are busy at every step and none carries more than its share, so an all-gather or a
reduce-scatter of n bytes takes (W-1)/W n bytes on each link, which is the least possible (Patarasu
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Signatures
and results are those of naive_collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titanlite.lab.group import Group, wait_all
from titanlite.lab.naive_collectives import Combine


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """The root's tensor, on every device, in W chunks: while one is passed on the next arrives."""
    distance = (group.rank - root) % group.size
    chunks = []
    sending = []
    for chunk in tensor.flatten().tensor_split(group.size):
        if distance > 0:
            chunk = group.recv(chunk, group.rank - 1)
        if distance < group.size - 1:
            sending.append(group.isend(chunk, group.rank + 1))
        chunks.append(chunk)
    wait_all(sending)
    return torch.cat(chunks).view(tensor.shape)


def scatter(group: Group, tensors: Sequence[torch.Tensor], root: int = 0) -> torch.Tensor:
    """The root's tensors[r], on device r: the farthest one's goes first; each passes on."""
    distance = (group.rank - root) % group.size
    sending = []
    for target in range(group.size - 1, distance, -1):
        tensor = tensors[(root + target) % group.size]
        if distance > 0:
            tensor = group.recv(tensor, group.rank - 1)
        sending.append(group.isend(tensor, group.rank + 1))
    mine = tensors[group.rank]
    mine = group.recv(mine, group.rank - 1) if distance > 0 else mine.clone()
    wait_all(sending)
    return mine


def gather(group: Group, tensor: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
    """Every device's tensor, in group order, on the root; each passes on what comes from behind."""
    distance = (root - group.rank) % group.size
    if distance > 0:
        sending = [group.isend(tensor, group.rank + 1)]
        for _ in range(group.size - 1 - distance):
            sending.append(group.isend(group.recv(tensor, group.rank - 1), group.rank + 1))
        wait_all(sending)
        return None
    # The nearest device behind the root arrives first.
    arrived = [tensor.clone(), *(group.recv(tensor, group.rank - 1) for _ in group.peers)]
    return [arrived[(root - rank) % group.size] for rank in range(group.size)]


def reduce(
    group: Group, tensor: torch.Tensor, root: int = 0, combine: Combine = torch.add
) -> torch.Tensor | None:
    """The sum on the root, None elsewhere: W chunks, each growing on its way round to the root."""
    distance = (root - group.rank) % group.size
    chunks = []
    sending = []
    for chunk in tensor.flatten().tensor_split(group.size):
        if distance < group.size - 1:
            chunk = combine(group.recv(chunk, group.rank - 1), chunk)
        if distance > 0:
            sending.append(group.isend(chunk, group.rank + 1))
        chunks.append(chunk)
    wait_all(sending)
    return torch.cat(chunks).view(tensor.shape) if distance == 0 else None


def all_gather(group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every device's tensor, in group order: W-1 times, pass on what arrived last."""
    gathered = {group.rank: tensor.clone()}
    for step in range(1, group.size):
        tensor = group.shift(tensor)
        gathered[(group.rank - step) % group.size] = tensor
    return [gathered[rank] for rank in range(group.size)]


def reduce_scatter(
    group: Group, tensors: Sequence[torch.Tensor], combine: Combine = torch.add
) -> torch.Tensor:
    """The sum of tensors[r] on device r: W-1 times, pass on a partial sum and add to the next."""
    # The sum that ends on device r starts on device r+1 and comes once round.
    partial = tensors[(group.rank - 1) % group.size]
    for step in range(2, group.size + 1):
        mine = tensors[(group.rank - step) % group.size]
        partial = combine(group.shift(partial, mine), mine)
    return partial if group.size > 1 else partial.clone()


def all_reduce(group: Group, tensor: torch.Tensor, combine: Combine = torch.add) -> torch.Tensor:
    """The sum, on every device: a reduce-scatter of W chunks, then an all-gather of their sums."""
    chunks = tensor.flatten().tensor_split(group.size)
    partial = reduce_scatter(group, chunks, combine)
    sums = {group.rank: partial}
    # As all_gather, for chunks that may differ in size by one element.
    for step in range(1, group.size):
        source = (group.rank - step) % group.size
        partial = group.shift(partial, chunks[source])
        sums[source] = partial
    return torch.cat([sums[rank] for rank in range(group.size)]).view(tensor.shape)


def all_to_all(group: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """tensors[r] of every device on device r: bundles go round, each takes its own out."""
    # In the bundle the tensor for the next device is first.
    bundle = torch.stack([tensors[peer] for peer in group.peers]) if group.size > 1 else None
    received = {group.rank: tensors[group.rank].clone()}
    for step in range(1, group.size):
        assert bundle is not None
        bundle = group.shift(bundle)
        received[(group.rank - step) % group.size] = bundle[0]
        bundle = bundle[1:]
    return [received[rank] for rank in range(group.size)]


def barrier(group: Group) -> None:
    """Return on no device before it was called on all: a one-byte token goes round twice."""
    token = torch.zeros(1, dtype=torch.uint8)
    for _ in range(2 if group.size > 1 else 0):
        if group.rank > 0:
            group.recv(token, group.rank - 1)
        sending = group.isend(token, group.rank + 1)
        if group.rank == 0:
            group.recv(token, group.rank - 1)
        sending.wait()
