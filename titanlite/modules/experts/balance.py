"""What one expert layer does for balance: it counts its slots, and computes an auxiliary loss.

    Tally           the numbers of one layer on one rank, of the step that runs
    observe         adds a forward pass to the tally when its backward pass runs
    sequence_loss   DeepSeek-V3's sequence auxiliary loss

A forward pass may run twice (recomputation) or never train (validation), but the backward pass of
each microbatch runs once. So tokens are counted, and the auxiliary loss gets its gradient, there.

Source of the loss: arXiv 2412.19437, equations 17 to 20.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group


class Tally:
    """The slots of each expert, the dropped slots, and the sum of auxiliary losses, of a rank."""

    def __init__(self) -> None:
        self.num_sequences = 1
        """The sequences of the step on all ranks, by which the auxiliary loss is divided."""
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.counts: Tensor | None = None
        self.loss: Tensor | None = None
        self.dropped: Tensor | None = None

    def add(self, counts: Tensor, loss: Tensor | None, dropped: Tensor | None = None) -> None:
        if dropped is not None:
            self.dropped = dropped if self.dropped is None else self.dropped + dropped
        self.counts = counts if self.counts is None else self.counts + counts
        if loss is not None:
            loss = loss.detach().double()
            self.loss = loss if self.loss is None else self.loss + loss


def observe(
    weights: Tensor,
    chosen: Tensor,
    num_experts: int,
    loss: Tensor | None,
    tally: Tally,
    kept: Tensor | None = None,
) -> Tensor:
    """`weights` unchanged; its backward pass adds to `tally`, and sends `loss` its gradient.

    `loss` is this rank's share of the sum of the sequences' auxiliary losses, or None.
    `kept` are the slots that are not dropped; all are counted.
    """
    dropped = None if kept is None else (~kept).sum()
    counts = count_slots(chosen.reshape(1, -1), num_experts)[0]
    observed: Tensor = _Observe.apply(weights, loss, counts, tally, dropped)
    return observed


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        loss: Tensor | None,
        counts: Tensor,
        tally: Tally,
        dropped: Tensor | None,
    ) -> Tensor:
        ctx.loss = None if loss is None else loss.detach()
        ctx.counts, ctx.tally, ctx.dropped = counts, tally, dropped
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        ctx.tally.add(ctx.counts, ctx.loss, ctx.dropped)
        of_loss = None
        if ctx.loss is not None:
            of_loss = torch.full_like(ctx.loss, 1.0 / ctx.tally.num_sequences)
        return gradient, of_loss, None, None, None


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
