"""The device mesh of a plan: one process group an axis, and the sub-meshes that the steps take."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.mesh.parallel_dims import AXES, ParallelDims, axes_where, flat_name


@dataclass(frozen=True)
class Meshes:
    """The world as axes, and the parts of it that each parallelism uses.

    `pp`, `tp` and `cp` are None where that axis has one rank. `dp` is what FSDP2 takes: 1-D, or 2-D
    to replicate over the first axis and shard over the second. FSDP2 shards over all axes of the
    table whose weights are sharded, flattened to one: ranks of the cp axis hold the same parameters
    and different tokens, as those of dp_shard do, and the two together are dp_shard_cp.
    """

    world: DeviceMesh
    pp: DeviceMesh | None
    tp: DeviceMesh | None
    cp: DeviceMesh | None
    dp: DeviceMesh

    def axes_of_groups(self) -> dict[str, str]:
        """Process group -> the axis it belongs to; a group of all ranks is called that as well."""
        named = [(axis, self.world) for axis in self.world.mesh_dim_names or ()]
        named += [(axis, self.dp) for axis in self.dp.mesh_dim_names or ()]
        # dp_shard_cp is cp's own group where dp_shard is of one rank: the mesh's axis names it.
        axes: dict[str, str] = {}
        for axis, mesh in named:
            axes.setdefault(mesh.get_group(axis).group_name, axis)
        everyone = dist.distributed_c10d._get_default_group().group_name
        if everyone in axes:
            axes[everyone] += " (the world)"
        return axes


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Make the process groups of `dims`; every rank of the world must call this.

    Axes of degree 1 have no group, but for the first that weights are sharded over: its mesh of
    one rank carries mixed precision where nothing is sharded.
    """
    sharded, replicated = (axes_where(weights=kind) for kind in ("sharded", "replicated"))
    axes = [axis for axis in AXES if dims.degrees[axis] > 1 or axis == sharded[0]]
    world = init_device_mesh(
        device_type,
        tuple(dims.degrees[axis] for axis in axes),
        mesh_dim_names=tuple(axes),
    )
    dp = world[sharded[0]]
    used = tuple(axis for axis in sharded if axis in axes)
    if len(used) > 1:
        dp = world[used]._flatten(flat_name(used))
    if copies := [axis for axis in replicated if axis in axes]:
        # A slice of the world cannot have a flattened axis.
        dp = DeviceMesh._concatenate([*(world[axis] for axis in copies), dp])
    return Meshes(
        world=world,
        pp=world["pp"] if "pp" in axes else None,
        tp=world["tp"] if "tp" in axes else None,
        cp=world["cp"] if "cp" in axes else None,
        dp=dp,
    )
