"""Ring collectives: every device sends only to the next one.

All W links are busy in every step and carry equal loads. An all-gather or a reduce-scatter of n
bytes sends (W-1)/W n bytes over each link, which is optimal (Patarasu and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009). Signatures and results are the same as
in naive_collectives.py.
"""

from collections.abc import Sequence

import torch

from titanlite.tools.lab.group import Group, wait_all


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """The root's tensor, on every device: W chunks, pipelined around the ring."""
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
    """The root's tensors[r], on device r: the farthest is sent first and forwarded."""
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
    """Every device's tensor, in group order, on the root; devices forward what they receive."""
    distance = (root - group.rank) % group.size
    if distance > 0:
        sending = [group.isend(tensor, group.rank + 1)]
        for _ in range(group.size - 1 - distance):
            sending.append(group.isend(group.recv(tensor, group.rank - 1), group.rank + 1))
        wait_all(sending)
        return None
    # The tensor of the device just before the root arrives first.
    arrived = [tensor.clone(), *(group.recv(tensor, group.rank - 1) for _ in group.peers)]
    return [arrived[(root - rank) % group.size] for rank in range(group.size)]


def reduce(group: Group, tensor: torch.Tensor, root: int = 0) -> torch.Tensor | None:
    """The sum on the root, None elsewhere: W chunks, reduced on their way around the ring."""
    distance = (root - group.rank) % group.size
    chunks = []
    sending = []
    for chunk in tensor.flatten().tensor_split(group.size):
        if distance < group.size - 1:
            chunk = group.recv(chunk, group.rank - 1) + chunk
        if distance > 0:
            sending.append(group.isend(chunk, group.rank + 1))
        chunks.append(chunk)
    wait_all(sending)
    return torch.cat(chunks).view(tensor.shape) if distance == 0 else None


def all_gather(group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every device's tensor, in group order: W-1 times, forward the tensor received last."""
    gathered = {group.rank: tensor.clone()}
    for step in range(1, group.size):
        tensor = group.shift(tensor)
        gathered[(group.rank - step) % group.size] = tensor
    return [gathered[rank] for rank in range(group.size)]


def reduce_scatter(group: Group, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors[r] on device r: W-1 times, forward a partial sum and add to the next."""
    # The sum for device r starts on device r+1 and travels once around the ring.
    partial = tensors[(group.rank - 1) % group.size]
    for step in range(2, group.size + 1):
        mine = tensors[(group.rank - step) % group.size]
        partial = group.shift(partial, mine) + mine
    return partial if group.size > 1 else partial.clone()


def all_reduce(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """The sum, on every device: a reduce-scatter of W chunks, then an all-gather of the sums."""
    chunks = tensor.flatten().tensor_split(group.size)
    partial = reduce_scatter(group, chunks)
    sums = {group.rank: partial}
    # Like all_gather, for chunks whose sizes may differ by one element.
    for step in range(1, group.size):
        source = (group.rank - step) % group.size
        partial = group.shift(partial, chunks[source])
        sums[source] = partial
    return torch.cat([sums[rank] for rank in range(group.size)]).view(tensor.shape)


def all_to_all(group: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """tensors[r] of every device, on device r: bundles go around; each device removes its part."""
    received = {group.rank: tensors[group.rank].clone()}
    # For the next device, the one after it, and so on; the last is this device's own.
    bundle = torch.stack([tensors[peer] for peer in [*group.peers, group.rank]])[:-1]
    for step in range(1, group.size):
        bundle = group.shift(bundle)
        received[(group.rank - step) % group.size] = bundle[0]
        bundle = bundle[1:]
    return [received[rank] for rank in range(group.size)]


def barrier(group: Group) -> None:
    """Block until all devices have called it: a one-byte token goes around the ring twice."""
    token = torch.zeros(1, dtype=torch.uint8)
    for _ in range(2 if group.size > 1 else 0):
        if group.rank > 0:
            group.recv(token, group.rank - 1)
        sending = group.isend(token, group.rank + 1)
        if group.rank == 0:
            group.recv(token, group.rank - 1)
        sending.wait()
