"""Capacity: the slots that an expert computes in each sequence are limited, and others are dropped.

The limit and the order in which slots get a place are those of whole sequences. So no plan, no
microbatch size and no rounding error changes which slots are dropped.

Source of the limit: Switch Transformer, arXiv 2101.03961, there per batch and rank.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from titanlite.modules.experts.balance import count_slots


def kept_slots(
    chosen_TBK: Tensor, places_T: Tensor, num_experts: int, factor: float, groups: Sequence[str]
) -> Tensor:
    """Which of this rank's slots have a place in their expert: bool [T, B, K].

    An expert has ceil(factor K T / E) places in each sequence of T tokens, and the tokens get them
    in their order in the sequence. `places_T` are the numbers of this rank's tokens in their
    sequence. The ranks of `groups` hold the others; their choices are gathered.
    """
    whole_TBK, everyone = chosen_TBK, places_T
    for name in groups:
        whole_TBK, everyone = _gather(whole_TBK, name), _gather(everyone, name)
    length, top_k = whole_TBK.size(0), whole_TBK.size(-1)
    in_order = torch.empty_like(whole_TBK).index_copy_(0, everyone, whole_TBK)
    slots_BS = in_order.transpose(0, 1).flatten(1)
    counts_BE = count_slots(slots_BS, num_experts)
    first_BE = counts_BE.cumsum(1) - counts_BE
    experts_BS, by_expert_BS = slots_BS.sort(dim=1, stable=True)
    each = torch.arange(slots_BS.size(1), device=slots_BS.device)
    has_place = each - first_BE.gather(1, experts_BS) < capacity(length, top_k, num_experts, factor)
    kept_BS = torch.empty_like(has_place).scatter_(1, by_expert_BS, has_place)
    return kept_BS.unflatten(1, (length, top_k)).transpose(0, 1).index_select(0, places_T)


def capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """The slots of a sequence that one expert computes."""
    return math.ceil(factor * top_k * num_tokens / num_experts)


def _gather(x: Tensor, name: str) -> Tensor:
    functional = torch.ops._c10d_functional
    size = _resolve_process_group(GroupName(name)).size()
    gathered: Tensor = functional.all_gather_into_tensor(x.contiguous(), size, name)
    return functional.wait_tensor(gathered)
