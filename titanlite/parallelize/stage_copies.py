"""The copies of tied weights in a pipeline whose stages hold different names of one parameter.

All copies start equal, since a parameter is initialized by its first name. A stage's backward pass
computes the gradient of its own use of the weight. `sum_gradients` adds these up: over the ranks
that have copies by P2P messages, in the same order on each, so that equal updates keep the copies
equal to the bit. If a rank has several copies, as in a V, only the first has a gradient and is
updated; the others take over its values before each forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.names import canonical_name


@dataclass(frozen=True)
class _TiedWeight:
    """A tied weight with copies in several stages, one of them at least on this rank."""

    name: str
    places: tuple[int, ...]
    """The ranks on the pp axis that have a copy, ascending."""
    own: tuple[tuple[int, str], ...]
    """This rank's copies: (stage, name there), in the order of the stages."""
    is_counted: bool
    """Whether this rank has the first of all copies."""


class StageCopies:
    """This rank's copies of tied weights, and the sums of their gradients over the stages.

    `tied` is `find_tied` of the whole model. `parts` are this rank's stages; `plain_parts` are all
    stages, as split_model returns them. `group` is the process group of the pp axis, in which stage
    i is on rank `stage_to_rank[i]`.
    """

    def __init__(
        self,
        tied: Mapping[str, str],
        parts: Mapping[int, nn.Module],
        plain_parts: Sequence[nn.Module],
        stage_to_rank: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._parts, self._group, self._device = parts, group, device
        self._rank = dist.get_rank(group)
        copies: dict[str, list[tuple[int, str]]] = {first: [] for first in tied.values()}
        for stage, part in enumerate(plain_parts):
            for name, _ in part.named_parameters():
                if (first := tied.get(name, name)) in copies:
                    copies[first].append((stage, name))
        self._weights = [
            _TiedWeight(
                first,
                tuple(sorted({stage_to_rank[stage] for stage, _ in found})),
                tuple((stage, name) for stage, name in found if stage in parts),
                found[0][0] in parts,
            )
            for first, found in copies.items()
            if len(found) > 1 and any(stage in parts for stage, _ in found)
        ]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradient of each tied weight over its copies.

        The gradients must be complete on each stage: accumulated over all microbatches, reduced
        over data-parallel ranks, and not Partial. Every rank with a copy must call this.
        """
        for weight in self._weights:
            first, *followers = self._copies_of(weight)
            if not first.requires_grad:
                continue
            total = self._own_sum(first, followers)
            for follower in followers:
                follower.grad = None
            if len(weight.places) > 1:
                total.copy_(self._sum_over_ranks(weight.places, total))

    def summed(self, name: str) -> Tensor | None:
        """The sum of the gradients of the tied weight `name` over its copies, which are unchanged.

        None if this rank has no copy of it. Every rank with a copy must call this.
        """
        for weight in self._weights:
            if weight.name == name:
                first, *followers = self._copies_of(weight)
                total = self._own_sum(first, followers, in_place=False)
                return self._sum_over_ranks(weight.places, total)
        return None

    @torch.no_grad()
    def update_followers(self) -> None:
        """Copy the values of each tied weight to its further copies on this rank."""
        for weight in self._weights:
            first, *followers = self._copies_of(weight)
            for follower in followers:
                _local(follower).copy_(_local(first))

    def followers(self) -> list[nn.Parameter]:
        """The further copies on this rank of weights that it has already: not to be optimized."""
        return [p for weight in self._weights for p in self._copies_of(weight)[1:]]

    def repeated(self) -> list[nn.Parameter]:
        """This rank's copies that are not the first of all: not counted in the gradient norm."""
        return [
            parameter
            for weight in self._weights
            for parameter in self._copies_of(weight)[weight.is_counted :]
        ]

    def _copies_of(self, weight: _TiedWeight) -> list[nn.Parameter]:
        # Looked up each time: allocating a part replaces its parameters, and wrappers rename them.
        found = []
        for stage, wanted in weight.own:
            named = self._parts[stage].named_parameters()
            found.append(next(p for name, p in named if canonical_name(name) == wanted))
        return found

    def _own_sum(
        self, first: nn.Parameter, followers: Sequence[nn.Parameter], *, in_place: bool = True
    ) -> Tensor:
        """The sum of the local gradients of this rank's copies, by default in that of the first."""
        if first.grad is None:
            first.grad = torch.zeros_like(first)
        total = _local(first.grad) if in_place else _local(first.grad).clone()
        for follower in followers:
            if follower.grad is not None:
                total += _local(follower.grad)
        return total

    def _sum_over_ranks(self, places: Sequence[int], own: Tensor) -> Tensor:
        """The sum of `own` over the ranks `places`, added in their order on each of them."""
        sent = own.to(self._device).contiguous()
        total: Tensor | None = None
        for place in places:
            share = sent if place == self._rank else self._exchange(place, sent)
            total = share if total is None else total + share
        assert total is not None
        return total.to(own.device)

    def _exchange(self, place: int, sent: Tensor) -> Tensor:
        """Send a tensor to the rank `place` and return the tensor of the same shape from there."""
        received = torch.empty_like(sent)
        calls: list[Any] = [
            lambda: dist.isend(sent, group=self._group, group_dst=place),
            lambda: dist.irecv(received, group=self._group, group_src=place),
        ]
        # NCCL runs the calls between two ranks in order, so one rank has to receive first.
        for work in [call() for call in (calls if self._rank < place else reversed(calls))]:
            assert work is not None
            work.wait()
        return received


def _local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or a plain tensor itself; changes to it change the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
