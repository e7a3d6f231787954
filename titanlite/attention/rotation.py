"""How keys and values reach the ranks that need them, and their gradients come home.

Two ways with one interface: `Ring` passes blocks from neighbour to neighbour, the next one in
flight while the present one is computed; `Gather` fetches all of them at once. Both hand each
block to a function as it arrives, and know nothing of attention.

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

from titanlite.attention.layout import Layout
from titanlite.errors import ConfigError

# torch 2.13 renames these two and warns of the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

Visit = Callable[[int, Tensor], None]
VisitBackward = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Rotation(ABC):
    """The keys and values of all ranks of `group`, brought to this rank block by block.

    Every rank of the group has to make the same calls in the same order. A rank's own block comes
    first; a block that the causal mask empties for this rank is not visited.
    """

    group: dist.ProcessGroup
    layout: Layout
    causal: bool

    @abstractmethod
    def forward(self, kv: Tensor, visit: Visit) -> None:
        """Call `visit(key_rank, kv)` for each block; its kv may end after the last key needed."""

    @abstractmethod
    def backward(self, kv: Tensor, visit: VisitBackward, dtype: torch.dtype) -> Tensor:
        """The same with visits that return their kv's gradient in `dtype`; the sum for this kv."""

    def _is_needed(self, key_rank: int, n: int) -> bool:
        return bool(self.layout.tiles(self.group.rank(), key_rank, n, self.causal))


class Ring(Rotation):
    """Each block goes from neighbour to neighbour, as far as a rank needs it, and as much of it.

    Holds two blocks at a time. A block's gradient travels one step behind it and gains each rank's
    part. Keys that no later rank needs leave the ring, and their gradient goes home from there.

    A step posts all its messages as one batch, computes, then waits. What a rank sends in a step
    its peer receives in the same step, so that even batches run in order cannot deadlock.
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
        """Whose keys this rank holds in a step."""
        return self.layout.holder(self.group.rank(), -step)

    def _hop(self, messages: _Messages, hop: int, tensor: Tensor, n: int) -> Tensor:
        """Pass on what of `tensor` makes this hop; return what the same hop brings (maybe no key).

        `tensor` belongs to the keys held one step before: they themselves or their gradient.
        """
        rank = self.group.rank()
        leaving = self.layout.num_keys_carried(self._held(hop - 1), hop, n, self.causal)
        coming = self.layout.num_keys_carried(self._held(hop), hop, n, self.causal)
        messages.send(tensor[:, :, :leaving], self.layout.holder(rank, 1))
        return messages.receive(tensor, coming, self.layout.holder(rank, -1))

    def _go_home(self, messages: _Messages, hop: int, grad: Tensor, n: int) -> tuple[Tensor, slice]:
        """Send home the gradient of the keys that end their way before this hop.

        Returns the gradient of this rank's own keys that end theirs there, and which keys.
        """
        owner, rank = self._held(hop - 1), self.group.rank()
        messages.send(grad[:, :, self._ending(owner, hop, n)], owner)
        ending = self._ending(rank, hop, n)
        sender = self.layout.holder(rank, hop - 1)
        return messages.receive(grad, ending.stop - ending.start, sender), ending

    def _ending(self, owner: int, hop: int, n: int) -> slice:
        """Which of the owner's keys make the hop before this one but not this one."""
        last = self.layout.num_keys_carried(owner, hop - 1, n, self.causal)
        return slice(self.layout.num_keys_carried(owner, hop, n, self.causal), last)


class Gather(Rotation):
    """All blocks gathered at once; their gradients summed and scattered at once.

    One collective in place of c - 1 hops, for c blocks of memory, and nothing that the mask empties
    is spared. The own block is computed while the others arrive.
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
    """The point-to-point messages of one step; empty ones are left out, on both sides alike."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.operations: list[dist.P2POp] = []
        self.pending: list[dist.Work] = []

    def send(self, tensor: Tensor, receiver: int) -> None:
        if tensor.numel():
            self._add(dist.isend, tensor.contiguous(), receiver)

    def receive(self, like: Tensor, num_keys: int, sender: int) -> Tensor:
        """A tensor like `like` but for its number of keys, filled once `wait` returns."""
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
    """The rotation of that name, one of `ROTATE_METHODS`; ConfigError for any other."""
    if name not in ROTATE_METHODS:
        known = ", ".join(f'"{known}"' for known in ROTATE_METHODS)
        raise ConfigError(f'rotate_method: "{name}" is not known; use one of {known}')
    return ROTATE_METHODS[name]
