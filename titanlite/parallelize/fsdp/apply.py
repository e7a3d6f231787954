"""apply_fsdp: shard parameters, gradients and optimizer state with FSDP2, over one or two axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from titanlite.errors import TitanliteError
from titanlite.mesh.parallel_dims import expert_shard_dim
from titanlite.modules.device_support import support
from titanlite.modules.experts import expert_layers
from titanlite.modules.gradient_sums import clear_sums, sum_gradient
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part
from titanlite.modules.tied import find_tied
from titanlite.parallelize.arguments import (
    Plan,
    as_plan,
    check_choice,
    check_dtypes,
    check_flags,
    check_mesh,
)
from titanlite.parallelize.plan import find_blocks
from titanlite.ranks.settings import ignore_warnings

RESHARD = ("default", "always", "never")


@dataclass(frozen=True)
class FSDPReport:
    """What apply_fsdp did: the number of units that it sharded."""

    num_units: int


def apply_fsdp(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: str = "default",
    pipelined: bool = False,
    cpu_offload: bool = False,
    pin_memory: bool | None = None,
    expert_mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
) -> FSDPReport:
    """Shard `model` in place with FSDP2.

    A unit (the embeddings, each block, the head, and the remaining parameters) is gathered before
    it computes, and its gradients are reduced afterwards. If embeddings and head share a weight,
    both are one unit, which stays gathered in between. A 1-D `dp_mesh` shards; a 2-D one replicates
    over its first axis and shards over its second (HSDP). With `expert_mesh`, in the same form, the
    routed experts of each layer are a unit, sharded by expert, or by rows if there are fewer
    experts than ranks. Computation is in `param_dtype` and reduction in `reduce_dtype`, by default
    the parameter's own. `pin_memory` pins the memory of shards under `cpu_offload`, by default
    where the device can.

    `reshard_after_forward` "always" frees a unit after its forward pass, "never" keeps it for the
    backward pass. "default" frees all but the head and the last block, which the backward pass
    needs first; if `pipelined`, none, or each microbatch would gather the units again.

    Gradients are summed, not averaged: the loss is already divided by the number of targets of the
    whole step. A scalar parameter, which FSDP2 cannot shard, stays on every rank, and its gradient
    is marked for GradientSums (gradient_sums.py).

    Raises TitanliteError for an invalid argument, a weight that is tied between a block and another
    unit, and experts that apply_ep has spread, without `expert_mesh`. Source:
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    plan = as_plan("apply_fsdp", model, plan)
    check_mesh("apply_fsdp", "dp_mesh", dp_mesh, most_axes=2)
    if expert_mesh is not None:
        check_mesh("apply_fsdp", "expert_mesh", expert_mesh, most_axes=2)
    check_choice("apply_fsdp", "reshard_after_forward", reshard_after_forward, RESHARD)
    check_dtypes("apply_fsdp", param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    check_flags("apply_fsdp", pipelined=pipelined, cpu_offload=cpu_offload)
    if pin_memory is None:
        pin_memory = can_pin(dp_mesh.device_type)
    check_flags("apply_fsdp", pin_memory=pin_memory)
    if any(isinstance(p, DTensor) or not p.requires_grad for p in model.parameters()):
        # FSDP2 warns about views because in-place changes to them would skip a hook. The output of
        # a tensor-parallel style is such a view if it is the local tensor of a DTensor, and so is
        # that of a frozen linear layer.
        ignore_warnings("FSDP2-wrapped module .* returned a view tensor")
    reshard = {"always": True, "never": False, "default": not pipelined}[reshard_after_forward]
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if cpu_offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)

    if expert_mesh is None:
        _refuse_spread_experts(model)
    scalars = _keep_scalars(model, dp_mesh)
    left = {id(p) for p in model.parameters() if p not in scalars}

    def shard(
        module: nn.Module | list[nn.Module],
        reshard_unit: bool,
        mesh: DeviceMesh = dp_mesh,
        place: Callable[[nn.Parameter], Shard | None] | None = None,
    ) -> None:
        for part in module if isinstance(module, list) else [module]:
            # Sharding replaces the parameter objects.
            left.difference_update(id(parameter) for parameter in part.parameters())
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard_unit,
            shard_placement_fn=place,
            ignored_params=scalars,
        )

    modules = dict(model.named_modules())
    embeddings, head = (
        [part for name in names if name in modules for part in _with_forward(modules[name])]
        for names in (plan.embeddings, plan.head)
    )
    if not plan.has_outer_units:
        embeddings, head = [], []
    blocks = find_blocks(model, plan)
    last_block = next(reversed(blocks.values()), None)
    always = reshard_after_forward == "always"
    units = 0
    for group, is_needed_first in _outer_units(model, embeddings, head, blocks):
        shard(group[0] if len(group) == 1 else group, always if is_needed_first else reshard)
        units += 1
    for block in blocks.values():
        reshard_block = always if block is last_block else reshard
        if expert_mesh is not None:
            place = partial(_place_expert, num_ranks=expert_mesh.size(expert_mesh.ndim - 1))
            for layer in expert_layers([block]).values():
                # FSDP2 sums their gradients over the ranks of tp, too.
                clear_sums(layer.experts)
                shard(layer.experts, reshard_block, expert_mesh, place)
                units += 1
        shard(block, reshard_block)
        units += 1
    # The root unit gets the remaining parameters, often none.
    units += bool(left)
    shard(model, reshard if plan.has_outer_units else always)

    for module in model.modules():
        # A single rank would divide by one, into a copy of each unit's gradients.
        if isinstance(module, FSDPModule) and (dp_mesh.size() > 1 or expert_mesh is not None):
            module.set_gradient_divide_factor(1.0)
            # FSDP2 implements a division, even by one, as PREMUL_SUM, which gloo lacks.
            module.set_force_sum_reduction_for_comms(True)
    return FSDPReport(units)


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """`module`, or the children of a list: a list has no forward, so FSDP2 refuses it."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [part for child in module.children() for part in _with_forward(child)]
    return [module]


def can_pin(device_type: str) -> bool:
    """Whether ranks can pin CPU memory: that needs a CUDA context (PyTorch's issue 150240)."""
    return support().capability(device_type) > (0, 0)


def _keep_scalars(model: nn.Module, dp_mesh: DeviceMesh) -> set[nn.Parameter]:
    """The scalar parameters of `model`, with their gradients marked to be summed over `dp_mesh`."""
    scalars = set()
    names = dp_mesh.mesh_dim_names or ("",) * dp_mesh.ndim
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 0:
                scalars.add(parameter)
                for dim, axis in enumerate(names):
                    sum_gradient(module, leaf, axis, dp_mesh.get_group(dim))
    return scalars


def _refuse_spread_experts(model: nn.Module) -> None:
    for name, layer in expert_layers([model]).items():
        if layer.experts.exchange is not None:
            raise TitanliteError(
                f"apply_fsdp: the experts of {name} are spread over the ranks of ep, so their "
                "gradients are reduced over other ranks than those of other weights; give "
                "expert_mesh=meshes.expert_dp, of build_meshes"
            )


def _place_expert(parameter: nn.Parameter, num_ranks: int) -> Shard:
    """By expert (dimension 0), or by rows if some of `num_ranks` had none."""
    return Shard(expert_shard_dim(local_part(parameter).size(0), num_ranks))


def _outer_units(
    model: nn.Module,
    embeddings: list[nn.Module],
    head: list[nn.Module],
    blocks: Mapping[str, nn.Module],
) -> list[tuple[list[nn.Module], bool]]:
    """The units outside the blocks, each with whether the backward pass needs it first.

    Embeddings and head are one unit if they share a parameter: FSDP2 replaces the parameters of a
    unit, and would untie one that another unit has, too. If one of its names is in neither, both
    are left to the root unit.
    """
    groups = {"embeddings": embeddings, "head": head} | {
        f"block {key}": [block] for key, block in blocks.items()
    }
    places = {
        id(module): place
        for place, group in groups.items()
        for part in group
        for module in part.modules()
    }

    def place_of(name: str) -> str:
        owner = model.get_submodule(name.rpartition(".")[0])
        return places.get(id(owner), "the root unit")

    separate = [(embeddings, False), (head, True)]
    for name, first in find_tied(model).items():
        apart = {place_of(name), place_of(first)}
        if len(apart) == 1:
            continue
        if any(place.startswith("block ") for place in apart):
            raise TitanliteError(
                f"apply_fsdp: {canonical_name(name)} and {canonical_name(first)} are one "
                f"parameter, but in two FSDP units, {' and '.join(sorted(apart))}; tie weights "
                "within a block, or between the plan's embeddings and head"
            )
        if "the root unit" in apart:
            return []
        separate = [(embeddings + head, True)]
    return [(group, is_needed_first) for group, is_needed_first in separate if group]
