"""The copies of a parameter that several stages of a pipeline hold.

These are tied weights, of which stages hold different names, and parameters of modules that no
stage names, such as one of the model itself. All copies start equal, since a parameter is
initialized by its first name. A stage's backward pass computes the gradient of its own use of the
weight. `sum_gradients` adds these up: over the ranks that have copies by P2P messages, in the same
order on each, so that equal updates keep the copies equal to the bit. If a rank has several copies,
as in a V, only the first has a gradient and is updated; the others take over its values before each
forward pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part


@dataclass(frozen=True)
class _Copied:
    """A parameter with copies in several stages, one of them at least on this rank."""

    name: str
    places: tuple[int, ...]
    """The ranks on the pp axis that have a copy, ascending."""
    own: tuple[tuple[int, str], ...]
    """This rank's copies: (stage, name there), in the order of the stages."""
    is_counted: bool
    """Whether this rank has the first of all copies."""
    is_tied: bool
    """Whether stages hold different names of it, so that each uses it."""


class StageCopies:
    """This rank's copies of parameters, and the sums of their gradients over the stages.

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
        copies = copies_in(plain_parts, tied)
        self._weights = [
            _Copied(
                first,
                tuple(sorted({stage_to_rank[stage] for stage, _ in found})),
                tuple((stage, name) for stage, name in found if stage in parts),
                found[0][0] in parts,
                first in tied.values(),
            )
            for first, found in copies.items()
            if any(stage in parts for stage, _ in found)
        ]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradient of each parameter over its copies.

        The gradients must be complete on each stage: accumulated over all microbatches, reduced
        over data-parallel ranks, and not Partial. A copy that its stage does not use has none; if
        no stage uses the parameter, it gets none. Every rank with a copy must call this.
        """
        for weight in self._weights:
            first, *followers = self._copies_of(weight)
            if not first.requires_grad:
                continue
            is_used = any(copy.grad is not None for copy in (first, *followers))
            total = self._own_sum(first, followers)
            for follower in followers:
                follower.grad = None
            if weight.is_tied and len(weight.places) > 1:
                total.copy_(self._sum_over_ranks(weight.places, total))
            elif len(weight.places) > 1:
                # With the number of ranks that use it.
                sent = torch.cat([total.flatten(), total.new_tensor([float(is_used)])])
                summed = self._sum_over_ranks(weight.places, sent)
                total.copy_(summed[:-1].view_as(total))
                # A planned step has no values.
                is_used = isinstance(summed, FakeTensor) or bool(summed[-1] > 0)
            if not is_used and not weight.is_tied:
                first.grad = None

    def summed(self, name: str) -> Tensor | None:
        """The sum of the gradients of the parameter `name` over its copies, which are unchanged.

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
        """Copy the values of each parameter to its further copies on this rank."""
        for weight in self._weights:
            first, *followers = self._copies_of(weight)
            for follower in followers:
                local_part(follower).copy_(local_part(first))

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

    def _copies_of(self, weight: _Copied) -> list[nn.Parameter]:
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
        total = local_part(first.grad) if in_place else local_part(first.grad).clone()
        for follower in followers:
            if follower.grad is not None:
                total += local_part(follower.grad)
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


def copies_in(
    parts: Sequence[nn.Module], tied: Mapping[str, str]
) -> dict[str, list[tuple[int, str]]]:
    """The parameters that several of `parts`, the stages of a model, hold: name -> (stage, name).

    The first name of a tied weight stands for all; the others are in the list.
    """
    copies: dict[str, list[tuple[int, str]]] = {}
    for stage, part in enumerate(parts):
        for name, _ in part.named_parameters():
            name = canonical_name(name)
            copies.setdefault(tied.get(name, name), []).append((stage, name))
    return {first: found for first, found in copies.items() if len(found) > 1}
