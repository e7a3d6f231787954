"""Dispatch: a token's copies are sorted by expert, computed, and combined again.

A slot is one (token, expert) pair: N tokens with K experts each have N K slots. Slots are sorted by
expert, and those of one expert stay in the order of the tokens. Both directions are permutations,
in the backward pass too, so no sum depends on the order in which threads or ranks arrive.

With expert parallelism, an Exchange sends each slot to the rank that holds its expert, and back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Order(NamedTuple):
    """The order of slots: `by_expert` [N K] sorts them by expert, and `back` [N K] undoes it.

    `counts` [E] is the number of slots of each expert. All are int64.
    """

    by_expert: Tensor
    back: Tensor
    counts: Tensor


def order_slots(chosen_NK: Tensor, num_experts: int) -> Order:
    """The order of the slots of tokens with the experts `chosen_NK`."""
    slots = chosen_NK.flatten()
    experts, by_expert = slots.sort(stable=True)
    places = torch.arange(slots.numel(), device=slots.device)
    back = torch.empty_like(by_expert).scatter_(0, by_expert, places)
    each = torch.arange(num_experts, device=slots.device)
    ends = torch.searchsorted(experts, each, right=True)
    return Order(by_expert, back, ends.diff(prepend=ends.new_zeros(1)))


def spread(x_ND: Tensor, order: Order) -> Tensor:
    """The tokens' slots sorted by expert, [N K, D]."""
    return _Spread.apply(x_ND, order.by_expert, order.back)


def gather_back(rows: Tensor, order: Order) -> Tensor:
    """Rows sorted by expert, in the order of the tokens again: [N K, D]."""
    return _Permute.apply(rows, order.back, order.by_expert)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_tokens = x.size(0)
        return x.index_select(0, order // (order.numel() // x.size(0)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        of_slots = gradient.index_select(0, back)
        return of_slots.unflatten(0, (ctx.num_tokens, -1)).sum(1), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


Compute = Callable[[Tensor, Tensor, list[int]], Tensor]
"""(rows sorted by expert, the rows of each expert, the same as numbers) -> the experts' outputs."""


class Exchange:
    """Sends rows to the ranks that hold their experts, and the experts' outputs back.

    Rank r of the `size` ranks of `group` holds experts r E / size to (r + 1) E / size - 1.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group_name, self.size = group.group_name, group.size()

    def __call__(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        """The outputs of `compute`, which runs on the rank of each row's expert.

        `rows` are sorted by expert, and `counts` [E] are the rows of each expert; rows beyond their
        sum are left out. On an expert's rank its rows are sorted by source rank.
        """
        even = [counts.numel() // self.size] * self.size
        arriving = all_to_all(counts, even, even, self.group_name)
        by_source = arriving.view(self.size, -1)
        own_counts = by_source.sum(0)
        sent, received, sizes = host_sizes(
            rows.size(0), counts.view(self.size, -1).sum(1), by_source.sum(1), own_counts
        )
        own = _AllToAll.apply(rows[: sum(sent)], received, sent, self.group_name)
        # From (source rank, expert) to (expert, source rank).
        number = by_source.size(1)
        each = torch.arange(number, device=rows.device).repeat(self.size)
        experts = each.repeat_interleave(arriving, output_size=sum(received))
        order = experts.argsort(stable=True)
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device=order.device)
        )
        outputs = compute(_Permute.apply(own, order, back), own_counts, sizes)
        outputs = _Permute.apply(outputs, back, order)
        return _AllToAll.apply(outputs, sent, received, self.group_name)


def host_sizes(total: int, *counts: Tensor) -> list[list[int]]:
    """Tensors of counts as lists of integers, with one copy from the device.

    Without values (on "meta", or traced as fake tensors) `total` is split evenly in each.
    """
    if counts[0].is_meta or isinstance(counts[0], FakeTensor):
        sizes = [count.numel() for count in counts]
        return [[total // n + (index < total % n) for index in range(n)] for n in sizes]
    values = torch.cat(counts).tolist()
    found = []
    for count in counts:
        found.append(values[: count.numel()])
        values = values[count.numel() :]
    return found


def all_to_all(x: Tensor, received: list[int], sent: list[int], name: str) -> Tensor:
    """Send blocks of dimension 0 of `sent` sizes, and receive blocks of `received` sizes."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(
        functional.all_to_all_single(x.contiguous(), received, sent, name)
    )


class _AllToAll(torch.autograd.Function):
    """Row blocks of `sent` sizes go to the ranks, and blocks of `received` sizes arrive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], name: str) -> Tensor:
        ctx.received, ctx.sent, ctx.name = received, sent, name
        return all_to_all(x, received, sent, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, ctx.sent, ctx.received, ctx.name), None, None, None
