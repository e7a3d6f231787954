"""Experts by hand: tokens travel to the devices of their experts by all-to-alls, and back.

In a mixture of experts every token uses K of E feed-forwards (Shazeer et al. 2017,
https://arxiv.org/abs/1701.06538). Each device has its own tokens and E / W of the experts (GShard,
https://arxiv.org/abs/2006.16668). How many rows a device will receive depends on the choices of the
routers of all devices. So one all-to-all exchanges these counts, a second one sends the rows, and a
third one sends the experts' outputs back.

A slot is one (token, expert) pair. Shapes: N tokens per device, K experts per token, D features, H
hidden features, E experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import record_function

from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.group import Group, wait_all
from titanlite.tools.lab.mesh import Axes


@dataclass(frozen=True)
class Experts:
    """The weights of experts, each a SwiGLU: w1 and w3 are (experts, D, H), w2 (experts, H, D)."""

    w1: torch.Tensor
    w2: torch.Tensor
    w3: torch.Tensor

    def __len__(self) -> int:
        return self.w1.size(0)

    def shard(self, rank: int, world_size: int) -> "Experts":
        """The experts of one rank. Raises ValueError if they do not divide evenly."""
        if len(self) % world_size:
            raise ValueError(f"{len(self)} experts cannot be divided among {world_size} ranks")
        parts = (weight.chunk(world_size)[rank] for weight in (self.w1, self.w2, self.w3))
        return Experts(*parts)

    def compute(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """One expert's output for `rows` (rows, D): w2 (silu(w1 x) * w3 x)."""
        return (F.silu(rows @ self.w1[expert]) * (rows @ self.w3[expert])) @ self.w2[expert]


@dataclass(frozen=True)
class Load:
    """What the router's choice means for one device.

    `received` is the number of rows that each of this device's experts computed. `num_dropped` is
    the number of this device's slots that had no place in their expert.
    """

    received: tuple[int, ...]
    num_dropped: int


def route(x: torch.Tensor, gate: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and numbers of each token's experts, (N, K) each, best first.

    The scores are a softmax over the experts, the weights those of the best K divided by their sum.
    """
    scores, chosen = (x @ gate).softmax(-1).topk(top_k)
    return scores / scores.sum(-1, keepdim=True), chosen


def has_place(chosen: torch.Tensor, num_experts: int, capacity: int | None) -> torch.Tensor:
    """Which slots (N, K) are among the first `capacity` of their expert, in the tokens' order."""
    if capacity is None:
        return torch.ones_like(chosen, dtype=torch.bool)
    slots = F.one_hot(chosen.flatten(), num_experts)
    before = (slots.cumsum(0) - slots).gather(1, chosen.flatten().unsqueeze(1))
    return (before < capacity).view_as(chosen)


def capacity_of(num_tokens: int, top_k: int, num_experts: int, factor: float | None) -> int | None:
    """The rows that an expert accepts from `num_tokens` tokens: `factor` times an even share."""
    return None if factor is None else math.ceil(factor * top_k * num_tokens / num_experts)


def expert_parallel_layer(
    device: VirtualDevice,
    x: torch.Tensor,
    gate: torch.Tensor,
    experts: Experts,
    *,
    top_k: int,
    capacity_factor: float | None = None,
    axes: Axes = None,
) -> tuple[torch.Tensor, Load]:
    """The weighted sum of the outputs of each token's experts, (N, D), and this device's load.

    `x` (N, D) are this device's tokens, `experts` its E / W experts, and `gate` (D, E) the router's
    weight, of which every device has a replica. With a capacity factor, an expert accepts only the
    first ceil(factor K N / E) slots of each device, and the other slots contribute zero.

    After the backward pass, the gradients of the experts are complete, because they have seen the
    tokens of all devices. That of the gate is this device's part: sum it over the devices.
    """
    group = device.group(axes)
    names = tuple(device.mesh.axes if axes is None else axes)
    num_experts = len(experts) * group.size
    weights, chosen = route(x, gate, top_k)
    capacity = capacity_of(x.size(0), top_k, num_experts, capacity_factor)
    kept = has_place(chosen, num_experts, capacity).flatten().nonzero().squeeze(1)

    # Sort the slots by expert, and so also by the device that they go to. A stable sort keeps the
    # order of the tokens, so the result does not depend on chance.
    by_expert = kept[chosen.flatten()[kept].argsort(stable=True)]
    counts = chosen.flatten()[by_expert].bincount(minlength=num_experts)
    arriving = device.all_to_all(counts, names, label="counts").view(group.size, -1)
    sent, received = counts.view(group.size, -1).sum(1).tolist(), arriving.sum(1).tolist()

    def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        result: torch.Tensor = Exchange.apply(rows, sent, received, device, names)
        return result

    rows = exchange(x[by_expert // top_k], sent, received)
    # Rows come from one device after the other, and those of a device are sorted by expert.
    local = torch.arange(len(experts), device=x.device).repeat(group.size)
    owners = local.repeat_interleave(arriving.flatten())
    outputs = torch.zeros_like(rows)
    with record_function("experts"):
        for expert in range(len(experts)):
            its = (owners == expert).nonzero().squeeze(1)
            outputs = outputs.index_copy(0, its, experts.compute(expert, rows[its]))
    back = exchange(outputs, received, sent)

    slots = x.new_zeros(chosen.numel(), x.size(1)).index_copy(0, by_expert, back)
    out = (slots.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)
    load = Load(tuple(arriving.sum(0).tolist()), chosen.numel() - kept.numel())
    return out, load


class Exchange(torch.autograd.Function):
    """An all-to-all of rows: sent[r] rows go to rank r, received[r] rows come from it.

    The backward pass is the all-to-all in the opposite direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        device: VirtualDevice,
        axes: tuple[str, ...],
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.device, ctx.axes = sent, received, device, axes
        with device.collective("all_to_all", axes, "rows") as (group, _):
            return exchange_rows(group, rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with ctx.device.collective("all_to_all", ctx.axes, "gradients") as (group, _):
            gradient = exchange_rows(group, gradients[0], ctx.received, ctx.sent)
        return gradient, None, None, None, None


def exchange_rows(
    group: Group, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """The rows that all ranks sent to this one, in rank order; no message where there are none."""
    outgoing = rows.split(list(sent))
    result = rows.new_empty(sum(received), rows.size(1))
    incoming = result.split(list(received))
    incoming[group.rank].copy_(outgoing[group.rank])
    transfers = [group.irecv(incoming[peer], peer) for peer in group.peers if received[peer]]
    transfers += [group.isend(outgoing[peer], peer) for peer in group.peers if sent[peer]]
    wait_all(transfers)
    return result


def single_process_layer(
    x: torch.Tensor,
    gate: torch.Tensor,
    experts: Experts,
    *,
    top_k: int,
    capacity_factor: float | None = None,
    num_groups: int = 1,
) -> torch.Tensor:
    """The reference: every expert computes all tokens, and a mask selects those that it gets.

    The capacity applies to each of `num_groups` equal groups of tokens, as to those of a device.
    """
    weights, chosen = route(x, gate, top_k)
    groups = chosen.chunk(num_groups)
    capacity = capacity_of(groups[0].size(0), top_k, len(experts), capacity_factor)
    kept = torch.cat([has_place(group, len(experts), capacity) for group in groups])
    out = torch.zeros_like(x)
    for expert in range(len(experts)):
        share = (weights * kept * (chosen == expert)).sum(-1, keepdim=True)
        out = out + share * experts.compute(expert, x)
    return out
