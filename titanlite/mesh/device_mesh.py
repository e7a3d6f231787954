"""The device mesh of a plan: one process group per axis, and the sub-mesh of each parallelism."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.mesh.parallel_dims import AXES, EXPERT_SHARDS, ParallelDims, axes_where, flat_name


@dataclass(frozen=True)
class Meshes:
    """The mesh of all ranks, and the sub-mesh of each parallelism.

    `pp`, `tp` and `cp` are None if that axis has one rank. `dp` is the mesh for FSDP2: 1-D, or 2-D
    to replicate over the first dimension and shard over the second. FSDP2 shards weights over
    dp_shard and cp together, flattened into dp_shard_cp, because the ranks of both use the same
    weights on different tokens.

    `experts` is a second mesh of all ranks, for the parameters of experts; None if they are sharded
    like all others. It has the pp and dp_replicate of `world`. The ranks of dp_shard, cp and tp are
    divided into the axis efsdp, over which FSDP2 shards each expert, and, under expert parallelism,
    ep, whose ranks hold different experts.

    `tokens` has the ranks of `dp` and groups of its own, on which no gather of FSDP2 is waited for;
    None unless it is asked for.
    """

    world: DeviceMesh
    pp: DeviceMesh | None
    tp: DeviceMesh | None
    cp: DeviceMesh | None
    dp: DeviceMesh
    experts: DeviceMesh | None = None
    tokens: DeviceMesh | None = None

    @property
    def ep(self) -> DeviceMesh | None:
        """The mesh of the ranks that hold different experts; None without expert parallelism."""
        has_axis = self.experts is not None and "ep" in (self.experts.mesh_dim_names or ())
        return self.experts["ep"] if self.experts is not None and has_axis else None

    @property
    def expert_dp(self) -> DeviceMesh | None:
        """The mesh for FSDP2 of the experts, 1-D or 2-D like `dp`.

        None if experts have no mesh of their own; FSDP2 then shards them over `dp`.
        """
        if self.experts is None:
            return None
        replicated = axes_where(weights="replicated")
        names = self.experts.mesh_dim_names or ()
        used = (*(axis for axis in replicated if axis in names), EXPERT_SHARDS)
        return self.experts[used]

    def axes_of_groups(self) -> dict[str, str]:
        """The names of process groups and their axes.

        If an axis spans all ranks, " (the world)" is added to its name.
        """
        named = [(axis, self.world) for axis in self.world.mesh_dim_names or ()]
        for mesh in (self.dp, self.experts, self.tokens):
            if mesh is not None:
                named += [(axis, mesh) for axis in mesh.mesh_dim_names or ()]
        # If dp_shard has one rank, dp_shard_cp is cp's own group: the first name, cp, is kept.
        axes: dict[str, str] = {}
        for axis, mesh in named:
            axes.setdefault(mesh.get_group(axis).group_name, axis)
        everyone = dist.distributed_c10d._get_default_group().group_name
        if everyone in axes:
            axes[everyone] += " (the world)"
        return axes


def build_meshes(
    dims: ParallelDims, device_type: str, *, has_experts: bool = False, has_tokens: bool = False
) -> Meshes:
    """Create the process groups of `dims`; every rank must call this.

    Experts get a separate mesh under expert parallelism, and, if the model `has_experts`, under
    tensor parallelism: TP does not shard them, so FSDP2 shards them over the ranks of tp too. Axes
    of degree 1 have no group, except dp_shard, because mixed precision needs FSDP2, and FSDP2 a
    mesh. With `has_tokens`, `dp` has a second set of groups, `tokens`.
    """
    sharded, replicated = (axes_where(weights=kind) for kind in ("sharded", "replicated"))
    axes = [axis for axis in AXES if dims.degrees[axis] > 1 or axis == sharded[0]]
    world = init_device_mesh(
        device_type, tuple(dims.degrees[axis] for axis in axes), mesh_dim_names=tuple(axes)
    )

    def joined(names: tuple[str, ...]) -> DeviceMesh:
        return world[names[0]] if len(names) == 1 else world[names]._flatten(flat_name(names))

    used = tuple(axis for axis in sharded if axis in axes)
    dp = joined(used)
    if copies := tuple(axis for axis in replicated if axis in axes):
        # Slicing the world mesh does not work with a flattened axis.
        dp = DeviceMesh._concatenate([joined(copies), dp])
    return Meshes(
        world=world,
        pp=world["pp"] if "pp" in axes else None,
        tp=world["tp"] if "tp" in axes else None,
        cp=world["cp"] if "cp" in axes else None,
        dp=dp,
        experts=_build_expert_mesh(dims, device_type)
        if dims.experts_are_apart(has_experts or dims.ep_enabled)
        else None,
        tokens=_build_token_mesh(world, copies, used, dp) if has_tokens else None,
    )


def _build_token_mesh(
    world: DeviceMesh, copies: tuple[str, ...], shards: tuple[str, ...], dp: DeviceMesh
) -> DeviceMesh:
    names = world.mesh_dim_names or ()
    order = [*(name for name in names if name not in copies + shards), *copies, *shards]
    ranks = world.mesh.permute([names.index(name) for name in order])
    # The last dimensions are those of `dp`.
    ranks = ranks.reshape(-1, *dp.shape)
    groups: list[Any] = []
    for dim in range(1, ranks.ndim):
        rows = ranks.movedim(dim, -1).reshape(-1, ranks.size(dim)).tolist()
        groups.append(dist.new_subgroups_by_enumeration(rows)[0])
    return DeviceMesh.from_group(
        groups, dp.device_type, mesh=dp.mesh, mesh_dim_names=dp.mesh_dim_names
    )


def _build_expert_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh:
    stages = axes_where(weights="stages")
    degrees = {axis: dims.degrees[axis] for axis in stages if dims.degrees[axis] > 1}
    if dims.num_replicas > 1:
        degrees[dims.replica_dim] = dims.num_replicas
    degrees[EXPERT_SHARDS] = dims.num_expert_shards
    if dims.ep_enabled:
        # Innermost, so that it takes adjacent ranks: those of tp, then of cp, then of dp_shard.
        degrees["ep"] = dims.ep
    return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
