"""Balancing: how many tokens each expert gets, and what makes these numbers equal.

    Tally           the numbers of one layer on one rank, of the step that runs
    observe         adds a forward pass to the tally when its backward pass runs
    sequence_loss   DeepSeek-V3's sequence auxiliary loss
    Balancer        the layers of a job: sums the tallies over ranks, updates the balancing biases

A forward pass may run twice (recomputation) or never train (validation), but the backward pass of
each microbatch runs once. So tokens are counted, and the auxiliary loss gets its gradient, there.

Sources: the bias, arXiv 2408.15664, in TorchTitan's form; the loss, arXiv 2412.19437, equations 17
to 20.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from titanlite.names import canonical_name

if TYPE_CHECKING:
    from titanlite.experts.layer import ExpertLayer


class Tally:
    """The slots of each expert, and the sum of the sequences' auxiliary losses, of one rank."""

    def __init__(self) -> None:
        self.num_sequences = 1
        """The sequences of the step on all ranks, by which the auxiliary loss is divided."""
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.counts: Tensor | None = None
        self.loss: Tensor | None = None

    def add(self, counts: Tensor, loss: Tensor | None) -> None:
        """Add a microbatch."""
        self.counts = counts if self.counts is None else self.counts + counts
        if loss is not None:
            loss = loss.detach().double()
            self.loss = loss if self.loss is None else self.loss + loss


def observe(
    weights: Tensor, chosen: Tensor, num_experts: int, loss: Tensor | None, tally: Tally
) -> Tensor:
    """`weights` unchanged; its backward pass adds to `tally`, and sends `loss` its gradient.

    `loss` is this rank's share of the sum of the sequences' auxiliary losses, or None.
    """
    counts = count_slots(chosen.reshape(1, -1), num_experts)[0]
    observed: Tensor = _Observe.apply(weights, loss, counts, tally)
    return observed


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, loss: Tensor | None, counts: Tensor, tally: Tally
    ) -> Tensor:
        ctx.loss = None if loss is None else loss.detach()
        ctx.counts, ctx.tally = counts, tally
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        ctx.tally.add(ctx.counts, ctx.loss)
        of_loss = None
        if ctx.loss is not None:
            of_loss = torch.full_like(ctx.loss, 1.0 / ctx.tally.num_sequences)
        return gradient, of_loss, None, None


def count_slots(chosen: Tensor, num_experts: int) -> Tensor:
    """The number of slots of each expert in each row: [R, S] -> [R, E], int64."""
    counts = chosen.new_zeros(chosen.size(0), num_experts)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen))


def sequence_loss(
    scores_TBE: Tensor, chosen_TBK: Tensor, groups: Sequence[str], factor: float
) -> Tensor | None:
    """This rank's share of the sum over sequences of factor sum_e f_e P_e; None if factor is 0.

    For a sequence of T tokens, f_e = E / (K T) x (its slots of expert e) and P_e is the mean of its
    tokens' scores of e, divided by the sum of each token's scores. The slots are counted over all
    ranks of `groups`, which hold the other tokens of the sequences. P_e enters linearly, so each
    rank multiplies the whole f_e by its own tokens' share of P_e, and the shares add up.
    """
    if not factor:
        return None
    num_tokens, num_experts = scores_TBE.size(0), scores_TBE.size(-1)
    counts_BE = count_slots(chosen_TBK.transpose(0, 1).flatten(1), num_experts)
    for name in groups:
        functional = torch.ops._c10d_functional
        counts_BE = functional.wait_tensor(functional.all_reduce(counts_BE, "sum", name))
        num_tokens *= _resolve_process_group(GroupName(name)).size()
    fractions_BE = counts_BE * (num_experts / (chosen_TBK.size(-1) * num_tokens))
    shares_TBE = scores_TBE / scores_TBE.sum(-1, keepdim=True)
    means_BE = shares_TBE.sum(0) / num_tokens
    return factor * (fractions_BE.to(means_BE.dtype) * means_BE).sum()


def expert_layers(parts: Iterable[nn.Module]) -> dict[str, ExpertLayer]:
    """The expert layers of the parts of a model by canonical name."""
    from titanlite.experts.layer import ExpertLayer

    return {
        canonical_name(name): module
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, ExpertLayer)
    }


class Balancer:
    """The expert layers of a job, as far as this rank has them.

    `sizes` has the number of experts of every expert layer of the whole model, `layers` has those
    of this rank's parts, and `has_loss` says whether any layer has an auxiliary loss.

    A step calls `start`, runs its forward and backward passes, calls `finish` and, before the
    optimizer's update, `update`. Every rank of the world must call `finish`.
    """

    def __init__(
        self,
        layers: Mapping[str, ExpertLayer],
        sizes: Mapping[str, int],
        device: torch.device,
        *,
        has_loss: bool = False,
    ) -> None:
        self.layers, self.sizes, self.has_loss = layers, dict(sizes), has_loss
        self._device = device
        self.counts: dict[str, list[int]] = {}
        """Layer -> the slots of each expert in the last step, summed over all ranks."""
        self.loss: float | None = None
        """The auxiliary loss of the last step, summed over layers, the mean over sequences."""

    def start(self, num_sequences: int) -> None:
        """Start a step of `num_sequences` sequences on all ranks."""
        for layer in self.layers.values():
            layer.tally.reset()
            layer.tally.num_sequences = num_sequences

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the tallies over all ranks: a token counts on the one rank that routes it."""
        counts = torch.zeros(sum(self.sizes.values()), dtype=torch.int64, device=self._device)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        rows = counts.split(list(self.sizes.values()))
        for name, row in zip(self.sizes, rows, strict=True):
            tally = self.layers[name].tally if name in self.layers else Tally()
            if tally.counts is not None:
                row.copy_(tally.counts)
            if tally.loss is not None:
                loss += tally.loss / tally.num_sequences
        dist.all_reduce(counts)
        self.counts = dict(zip(self.sizes, (row.tolist() for row in rows), strict=True))
        if self.has_loss:
            dist.all_reduce(loss)
            self.loss = float(loss)

    @torch.no_grad()
    def update(self) -> None:
        """Raise the bias of experts with fewer slots than the mean, and lower that of the others.

        By `bias_step` each, less the mean of these changes: the mean of the biases stays zero.
        """
        for name, layer in self.layers.items():
            if layer.expert_bias is None or layer.bias_step is None:
                continue
            counts = self.counts[name]
            total, number = sum(counts), len(counts)
            # mean - count, times the number of experts, in integers.
            signs = [(total > count * number) - (total < count * number) for count in counts]
            change = layer.expert_bias.new_tensor(signs) * layer.bias_step
            layer.expert_bias += change - change.mean()
