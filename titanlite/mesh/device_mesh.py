"""The device mesh of a plan: one process group per axis, and the sub-mesh of each parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.mesh.parallel_dims import AXES, ParallelDims, axes_where, flat_name


@dataclass(frozen=True)
class Meshes:
    """The mesh of all ranks, and the sub-mesh of each parallelism.

    `pp`, `tp` and `cp` are None if that axis has one rank. `dp` is the mesh for FSDP2: 1-D, or 2-D
    to replicate over the first dimension and shard over the second. FSDP2 shards weights over
    dp_shard and cp together, because the ranks of both axes use the same weights on different
    tokens. If cp has several ranks, the two are flattened into one dimension, dp_shard_cp.
    """

    world: DeviceMesh
    pp: DeviceMesh | None
    tp: DeviceMesh | None
    cp: DeviceMesh | None
    dp: DeviceMesh

    def axes_of_groups(self) -> dict[str, str]:
        """Process group -> its axis; for a group of all ranks, the axis + " (the world)"."""
        named = [(axis, self.world) for axis in self.world.mesh_dim_names or ()]
        named += [(axis, self.dp) for axis in self.dp.mesh_dim_names or ()]
        # If dp_shard has one rank, dp_shard_cp is cp's own group: the first name, cp, is kept.
        axes: dict[str, str] = {}
        for axis, mesh in named:
            axes.setdefault(mesh.get_group(axis).group_name, axis)
        everyone = dist.distributed_c10d._get_default_group().group_name
        if everyone in axes:
            axes[everyone] += " (the world)"
        return axes


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Create the process groups of `dims`; every rank must call this.

    Axes of degree 1 have no group, except dp_shard: even if nothing is sharded, mixed precision
    needs FSDP2, and FSDP2 needs a mesh of one rank.
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
        # Slicing the world mesh does not work with a flattened axis.
        dp = DeviceMesh._concatenate([*(world[axis] for axis in copies), dp])
    return Meshes(
        world=world,
        pp=world["pp"] if "pp" in axes else None,
        tp=world["tp"] if "tp" in axes else None,
        cp=world["cp"] if "cp" in axes else None,
        dp=dp,
    )
