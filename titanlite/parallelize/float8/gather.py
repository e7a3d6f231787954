"""All-gather the weights of float8 layers in float8: one byte per element, and one scale.

    gather_in_float8     lets FSDP2 cast each shard before it gathers it
    precompute_scales    computes the scales of all weights at once, after an optimizer step

It uses FSDP2's extension points `fsdp_pre_all_gather` and `fsdp_post_all_gather`. The shards
themselves stay in full precision, so the optimizer and checkpoints see no float8.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from titanlite.modules.shards import fsdp_groups
from titanlite.parallelize.float8.linear import (
    Float8Linear,
    Float8Weight,
    Groups,
    amax_of,
    cast,
    reduce_max,
    scale_of,
)


class Float8Shard(torch.Tensor):
    """A shard of a weight that FSDP2 gathers in float8; otherwise a plain tensor."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Tensor.to, but the result is a Float8Shard too: CPU offload copies shards this way."""
        return super().to(*args, **kwargs).as_subclass(Float8Shard)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, torch.Size]]:
        """The bytes to gather, and the metadata: the scale and the size of the whole weight."""
        assert isinstance(module, Float8Linear)
        with module.while_scaling("cast"):
            shard = _as_computed(self.as_subclass(torch.Tensor), mp_policy.param_dtype)
            amax = _precomputed(module)
            if amax is None:
                groups = _groups_of(module, mesh.get_group(), outer_size)
                (amax,) = reduce_max([(amax_of(shard, None), groups)])
            recipe = module.recipe
            data, scale = cast(shard, scale_of(amax, recipe.dtype, recipe), recipe.dtype)
            rows = math.ceil(outer_size[0] / mesh.size())
            # gloo's collectives do not support float8, and FSDP2 gathers shards of equal size.
            padded = nn.functional.pad(data.view(torch.uint8), (0, 0, 0, rows - data.size(0)))
            return (padded,), (scale, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor, torch.Size],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight; `out`, if given, already has the new values and gets the scale."""
        (data,), (scale, size) = all_gather_outputs, metadata
        if out is not None:
            weight = out._local_tensor if isinstance(out, DTensor) else out
            assert isinstance(weight, Float8Weight)
            weight.scale = scale
            return None
        # These are views of memory that FSDP2 frees itself, so no inner tensors are returned.
        data8 = data.narrow(0, 0, size[0]).view(torch.float8_e4m3fn)
        return Float8Weight(data8, scale, param_dtype), ()


def gather_in_float8(model: nn.Module) -> int:
    """Let FSDP2 gather the weights of float8 layers in float8 from now on; return their number.

    The model must be sharded by apply_fsdp and have storage. Weights on a shard axis of one rank
    are not gathered, and not counted.
    """
    count = 0
    for fsdp_param in _sharded_weights(model):
        fsdp_param.reset_sharded_param()
        parameter = fsdp_param.sharded_param
        parameter._local_tensor = parameter._local_tensor.as_subclass(Float8Shard)
        fsdp_param._init_extensions()
        count += 1
    return count


@torch.no_grad()
def precompute_scales(model: nn.Module) -> None:
    """Compute the amax of every weight that is gathered in float8, in one reduction per group.

    The result is used until the weights change. Every rank must call this.
    """
    weights = [
        fsdp_param
        for fsdp_param in _sharded_weights(model)
        if hasattr(fsdp_param.sharded_param._local_tensor, "fsdp_pre_all_gather")
    ]
    if not weights:
        return
    wanted = []
    with weights[0]._module_info.module.while_scaling("scales"):
        for fsdp_param in weights:
            layer = fsdp_param._module_info.module
            group = fsdp_param.mesh_info.mesh.get_group(-1)
            groups = _groups_of(layer, group, fsdp_param._orig_size)
            with layer.while_scaling("amax"):
                wanted.append((amax_of_shard(fsdp_param), groups))
        maxima = reduce_max(wanted)
    for fsdp_param, amax in zip(weights, maxima, strict=True):
        parameter = fsdp_param.sharded_param
        fsdp_param._module_info.module.precomputed = (amax, _version(parameter))


def amax_of_shard(fsdp_param: Any) -> Tensor:
    """The amax of this rank's shard of a weight, in the dtype from which it is cast."""
    shard = fsdp_param.sharded_param._local_tensor.as_subclass(torch.Tensor)
    shard = _as_computed(shard, fsdp_param.mp_policy.param_dtype)
    return amax_of(shard.to(fsdp_param.device), None)


def _precomputed(layer: Float8Linear) -> Tensor | None:
    """The weight's precomputed amax, or None if the weight has changed since."""
    if layer.precomputed is None:
        return None
    amax, version = layer.precomputed
    return amax if version == _version(layer.weight) else None


def _version(parameter: Any) -> tuple[int, int]:
    # An operator increments the version of the DTensor or of its local tensor, not of both.
    return parameter._version, parameter._local_tensor._version


def _as_computed(shard: Tensor, param_dtype: torch.dtype | None) -> Tensor:
    """The shard in `param_dtype`, the dtype from which it is cast to float8; None: unchanged."""
    return shard if param_dtype is None else shard.to(param_dtype)


def _groups_of(layer: Float8Linear, shards: Any, local_size: torch.Size) -> Groups:
    """The groups over which a weight is sharded: of FSDP2's ranks, and tp's if tp shards it.

    On a group of the layer's own, an amax does not wait for FSDP2's gathers.
    """
    ranks = dist.get_process_group_ranks(shards)
    own = (
        name
        for name in layer.groups.tokens
        if dist.get_process_group_ranks(_resolve_process_group(GroupName(name))) == ranks
    )
    name = next(own, shards.group_name)
    is_cut = tuple(local_size) != (layer.out_features, layer.in_features)
    return (name, *layer.groups.features) if is_cut else (name,)


def _sharded_weights(model: nn.Module) -> list[Any]:
    """The FSDPParams of float8 layers' weights that FSDP2 shards over more than one rank."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for fsdp_param in (one for group in fsdp_groups(module) for one in group.fsdp_params):
                info = fsdp_param._module_info
                is_weight = isinstance(info.module, Float8Linear) and info.param_name == "weight"
                if is_weight and fsdp_param.mesh_info.shard_mesh_size > 1:
                    found.append(fsdp_param)
    return found
