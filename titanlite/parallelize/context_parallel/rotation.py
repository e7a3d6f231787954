"""Rotations: send keys and values to the ranks that need them, and return their gradients.

There are two, with one interface. `Ring` passes blocks from neighbour to neighbour and computes
one block while the next one is in flight; `Gather` all-gathers all blocks at once. Both call a
function for each block as it arrives; they do not depend on attention.

A block is one rank's keys and values in one tensor, kv [2, B, S, K, E] (S local tokens). Its
gradient has the same shape, in the accumulator's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.errors import ConfigError
from titanlite.modules.attention.layout import Layout

# torch 2.13 renames these two and warns about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

Visit = Callable[[int, Tensor], None]
VisitBackward = Callable[[int, Tensor], Tensor]


def gather_whole(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, [c, ...] in rank order."""
    whole = tensor.new_empty((group.size(), *tensor.shape))
    _all_gather(whole.flatten(0, 1), tensor.contiguous(), group=group)
    return whole


@dataclass(frozen=True)
class Rotation(ABC):
    """Brings the keys and values of all ranks of `group` to this rank, block by block.

    Every rank of the group must make the same calls in the same order. A rank visits its own block
    first and skips blocks that the causal mask hides completely.
    """

    group: dist.ProcessGroup
    layout: Layout
    causal: bool

    @abstractmethod
    def forward(self, kv: Tensor, visit: Visit) -> None:
        """Call `visit(key_rank, kv)` for each block; kv may be cut after the last needed key."""

    @abstractmethod
    def backward(self, kv: Tensor, visit: VisitBackward, dtype: torch.dtype) -> Tensor:
        """Call `visit` for each block, which returns the gradient of that kv in `dtype`.

        Returns the gradient of this rank's own `kv`, summed over all ranks.
        """

    def _is_needed(self, key_rank: int, n: int) -> bool:
        return bool(self.layout.tiles(self.group.rank(), key_rank, n, self.causal))


class Ring(Rotation):
    """Passes blocks from neighbour to neighbour; keys travel only as far as a rank needs them.

    A rank holds two blocks at a time. The gradient of a block follows it one step later and
    accumulates the contribution of each rank. Keys that no later rank needs leave the ring; the
    last rank that needed them sends their gradient directly to the owner.

    A step posts all its messages as one batch, computes, then waits. Every message is received in
    the step in which it is sent, so the ranks cannot deadlock even if batches run in order.
    """

    def forward(self, kv: Tensor, visit: Visit) -> None:
        n = kv.size(2)
        for step in range(self.group.size()):
            messages = _Messages(self.group)
            next_kv = self._hop(messages, step + 1, kv, n)
            messages.post()
            if self._is_needed(self._held(step), n):
                visit(self._held(step), kv)
            messages.wait()
            kv = next_kv

    def backward(self, kv: Tensor, visit: VisitBackward, dtype: torch.dtype) -> Tensor:
        n, num_ranks = kv.size(2), self.group.size()
        own_grad = grad = kv.new_empty(0)
        for step in range(num_ranks + 1):
            messages = _Messages(self.group)
            next_kv = self._hop(messages, step + 1, kv, n)
            if step >= 2:
                travelled = self._hop(messages, step, grad, n)
                returned, returned_keys = self._go_home(messages, step, grad, n)
            messages.post()
            if step == num_ranks or not self._is_needed(self._held(step), n):
                grad = torch.zeros_like(kv, dtype=dtype)
            else:
                grad = visit(self._held(step), kv)
            messages.wait()
            if step == 0:
                own_grad = grad
            elif step >= 2:
                grad += travelled
                own_grad[:, :, returned_keys] += returned
            kv = next_kv
        return own_grad

    def _held(self, step: int) -> int:
        """The rank whose keys this rank holds in `step`."""
        return self.layout.holder(self.group.rank(), -step)

    def _hop(self, messages: _Messages, hop: int, tensor: Tensor, n: int) -> Tensor:
        """Send the part of `tensor` that continues in this hop; return the part received.

        `tensor` holds the keys and values of the previous step, or their gradient. Either part may
        be empty.
        """
        rank = self.group.rank()
        leaving = self.layout.num_keys_carried(self._held(hop - 1), hop, n, self.causal)
        coming = self.layout.num_keys_carried(self._held(hop), hop, n, self.causal)
        messages.send(tensor[:, :, :leaving], self.layout.holder(rank, 1))
        return messages.receive(tensor, coming, self.layout.holder(rank, -1))

    def _go_home(self, messages: _Messages, hop: int, grad: Tensor, n: int) -> tuple[Tensor, slice]:
        """Send the gradient of the keys that leave the ring before this hop to their owner.

        Returns the gradient received for this rank's own keys that left there, and their slice.
        """
        owner, rank = self._held(hop - 1), self.group.rank()
        messages.send(grad[:, :, self._ending(owner, hop, n)], owner)
        ending = self._ending(rank, hop, n)
        sender = self.layout.holder(rank, hop - 1)
        return messages.receive(grad, ending.stop - ending.start, sender), ending

    def _ending(self, owner: int, hop: int, n: int) -> slice:
        """The owner's keys that are sent in the hop before this one but not in this one."""
        last = self.layout.num_keys_carried(owner, hop - 1, n, self.causal)
        return slice(self.layout.num_keys_carried(owner, hop, n, self.causal), last)


class Gather(Rotation):
    """All-gathers all blocks at once and reduce-scatters their gradients.

    One collective replaces c - 1 hops, but it takes the memory of c blocks, and also transfers
    masked blocks. The own block is computed while the others arrive.
    """

    def forward(self, kv: Tensor, visit: Visit) -> None:
        for key_rank, block in self._blocks(kv):
            visit(key_rank, block)

    def backward(self, kv: Tensor, visit: VisitBackward, dtype: torch.dtype) -> Tensor:
        grads = kv.new_zeros((self.group.size(), *kv.shape), dtype=dtype)
        for key_rank, block in self._blocks(kv):
            grads[key_rank] = visit(key_rank, block)
        own_grad = torch.empty_like(kv, dtype=dtype)
        _reduce_scatter(own_grad, grads.flatten(0, 1), group=self.group)
        return own_grad

    def _blocks(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        n, rank = kv.size(2), self.group.rank()
        blocks = kv.new_empty((self.group.size(), *kv.shape))
        work = _all_gather(blocks.flatten(0, 1), kv, group=self.group, async_op=True)
        yield rank, kv
        work.wait()
        for key_rank in range(self.group.size()):
            if key_rank != rank and self._is_needed(key_rank, n):
                yield key_rank, blocks[key_rank]


class _Messages:
    """The P2P messages of one step; both sides skip empty messages."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.operations: list[dist.P2POp] = []
        self.pending: list[dist.Work] = []

    def send(self, tensor: Tensor, receiver: int) -> None:
        if tensor.numel():
            self._add(dist.isend, tensor.contiguous(), receiver)

    def receive(self, like: Tensor, num_keys: int, sender: int) -> Tensor:
        """A tensor like `like` with `num_keys` keys, filled once `wait` returns."""
        tensor = like.new_empty((*like.shape[:2], num_keys, *like.shape[3:]))
        if num_keys:
            self._add(dist.irecv, tensor, sender)
        return tensor

    def _add(self, operation: Callable, tensor: Tensor, peer: int) -> None:
        self.operations.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer))

    def post(self) -> None:
        if self.operations:
            self.pending = dist.batch_isend_irecv(self.operations)

    def wait(self) -> None:
        for work in self.pending:
            work.wait()


ROTATE_METHODS: dict[str, type[Rotation]] = {"alltoall": Ring, "allgather": Gather}


def find_rotation(name: str) -> type[Rotation]:
    """The rotation `name`, a key of `ROTATE_METHODS`. Raises ConfigError for any other name."""
    if name not in ROTATE_METHODS:
        known = ", ".join(f'"{known}"' for known in ROTATE_METHODS)
        raise ConfigError(f'rotate_method: "{name}" is not known; use one of {known}')
    return ROTATE_METHODS[name]
