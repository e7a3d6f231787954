"""apply_cp: shard every sequence over ranks, with ring attention over the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.errors import TitanliteError
from titanlite.modules.attention import LAYOUTS, Layout
from titanlite.modules.batch import takes
from titanlite.parallelize.arguments import Plan, as_plan, check_choice, check_mesh
from titanlite.parallelize.context_parallel.ring import RingAttention
from titanlite.parallelize.context_parallel.rotation import ROTATE_METHODS
from titanlite.parallelize.plan import find_container


@dataclass(frozen=True)
class ContextParallelReport:
    """What apply_cp did: the blocks that have ring attention."""

    blocks: tuple[str, ...]


def apply_cp(
    model: nn.Module,
    cp_mesh: DeviceMesh,
    *,
    layout: str | Layout = "headtail",
    rotate_method: str = "alltoall",
    plan: Plan | None = None,
) -> ContextParallelReport:
    """Replace each block's inner attention by ring attention.

    `plan.attention` names, within a block, a module that is called with q [B, H, T, E] and k, v [B,
    K, T, E], causal if `plan.is_causal`. The rest of a block works token by token, but needs the
    tokens' positions in the whole sequence. `layout` determines which tokens each rank of the 1-D
    `cp_mesh` holds; the caller shards the batch accordingly.

    Raises TitanliteError for an invalid argument, and if the model lacks the plan's container of
    blocks, a block the attention, or the forward `positions` (it would number each rank's tokens
    from 0).
    """
    plan = as_plan("apply_cp", model, plan, axis="cp")
    check_mesh("apply_cp", "cp_mesh", cp_mesh)
    check_choice("apply_cp", "rotate_method", rotate_method, list(ROTATE_METHODS))
    if not isinstance(layout, Layout):
        check_choice("apply_cp", "layout", layout, list(LAYOUTS))
    blocks = dict(find_container(model, plan, "context parallelism").named_children())
    if not takes(model, "positions"):
        raise TitanliteError(
            f"context parallelism needs the positions of a rank's tokens, but forward of "
            f"{type(model).__name__} takes no `positions`; add this argument, [T] or [B, T]"
        )
    for key, block in blocks.items():
        try:
            block.get_submodule(plan.attention)
        except AttributeError:
            raise TitanliteError(
                f"context parallelism needs a module {plan.block_name(key)}.{plan.attention} that "
                "takes q, k and v; give its name in the plan's `attention`"
            ) from None
        ring = RingAttention(cp_mesh, layout, rotate_method, is_causal=plan.is_causal)
        block.set_submodule(plan.attention, ring)
    return ContextParallelReport(tuple(plan.block_name(key) for key in blocks))
