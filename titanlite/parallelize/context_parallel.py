"""apply_cp: let each rank hold a part of every sequence, and its attention see all of it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.attention import Layout, RingAttention
from titanlite.errors import TitanliteError
from titanlite.parallelize.plan import ParallelPlan, find_blocks, find_plan


def apply_cp(
    model: nn.Module,
    cp_mesh: DeviceMesh,
    *,
    layout: str | Layout = "headtail",
    rotate_method: str = "alltoall",
    plan: ParallelPlan | None = None,
) -> int:
    """Put ring attention in place of each block's inner attention; return how many.

    `plan.attention` names it within a block: a module that is called with q [B, H, T, E] and k, v
    [B, K, T, E] and is causal. Everything else in a block works token by token and stays as it is,
    given the tokens' true positions: `layout` says which tokens each rank of the 1-D `cp_mesh`
    holds, and cuts the batch accordingly where it enters. Raises TitanliteError where a block has
    no such module.
    """
    plan = plan or find_plan(model)
    blocks = find_blocks(model, plan)
    for key, block in blocks.items():
        try:
            block.get_submodule(plan.attention)
        except AttributeError:
            raise TitanliteError(
                f"context parallelism needs {plan.blocks}.{key}.{plan.attention}, the module that "
                "takes q, k and v; the plan's `attention` names it"
            ) from None
        block.set_submodule(plan.attention, RingAttention(cp_mesh, layout, rotate_method))
    return len(blocks)
