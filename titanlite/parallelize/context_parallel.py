"""apply_cp: let each rank hold a part of every sequence, and its attention see all of it."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.attention import LAYOUTS, Layout, RingAttention
from titanlite.batch import takes
from titanlite.errors import TitanliteError
from titanlite.parallelize.arguments import Plan, as_plan, check_choice, check_mesh
from titanlite.parallelize.plan import find_container

ROTATIONS = ("alltoall", "allgather")


def apply_cp(
    model: nn.Module,
    cp_mesh: DeviceMesh,
    *,
    layout: str | Layout = "headtail",
    rotate_method: str = "alltoall",
    plan: Plan | None = None,
) -> int:
    """Put ring attention in place of each block's inner attention; return how many.

    `plan.attention` names it within a block: a module that is called with q [B, H, T, E] and k, v
    [B, K, T, E] and is causal. Everything else in a block works token by token and stays as it is,
    given the tokens' true positions: `layout` says which tokens each rank of the 1-D `cp_mesh`
    holds, and cuts the batch accordingly where it enters. Raises TitanliteError for an argument
    that is wrong, where the model lacks the container of blocks that the plan names, where a block
    has no such module, and where the model's forward takes no `positions`: it would count a rank's
    tokens from 0.
    """
    plan = as_plan("apply_cp", model, plan)
    check_mesh("apply_cp", "cp_mesh", cp_mesh)
    check_choice("apply_cp", "rotate_method", rotate_method, ROTATIONS)
    if not isinstance(layout, Layout):
        check_choice("apply_cp", "layout", layout, list(LAYOUTS))
    blocks = dict(find_container(model, plan, "context parallelism").named_children())
    if not takes(model, "positions"):
        raise TitanliteError(
            f"context parallelism needs a model that is told which tokens it has, and forward of "
            f"{type(model).__name__} takes no `positions`; let it take them, [T] or [B, T]"
        )
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
