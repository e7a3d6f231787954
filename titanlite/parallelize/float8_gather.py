"""FSDP2's all-gather of float8 layers' weights, in float8: a byte an element, and a scale.

    gather_in_float8     has FSDP2 cast each shard before it is gathered
    precompute_scales    all weights' scales at once, after an optimizer step

FSDP2 asks a shard for `fsdp_pre_all_gather` and `fsdp_post_all_gather`. Shards stay what they are,
in full precision: the optimizer and checkpoints see no float8.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from titanlite.parallelize.float8_linear import (
    Float8Linear,
    Float8Weight,
    Groups,
    amax_of,
    cast,
    reduce_max,
    scale_of,
)


class Float8Shard(torch.Tensor):
    """A shard of a weight that is cast before FSDP2 gathers it; else a plain tensor."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As any tensor's; what is copied from the CPU to be gathered stays such a shard."""
        return super().to(*args, **kwargs).as_subclass(Float8Shard)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, torch.Size]]:
        """The bytes to gather, and what goes with them: the scale, and the whole's size."""
        assert isinstance(module, Float8Linear)
        shard = _as_computed(self.as_subclass(torch.Tensor), mp_policy.param_dtype)
        amax = _precomputed(module)
        if amax is None:
            groups = _groups_of(module, mesh.get_group().group_name, outer_size)
            (amax,) = reduce_max([(amax_of(shard, None), groups)])
        recipe = module.recipe
        data, scale = cast(shard, scale_of(amax, recipe.dtype, recipe), recipe.dtype)
        rows = math.ceil(outer_size[0] / mesh.size())
        # Collectives of gloo take no float8, and FSDP2 gathers shards of one size.
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
        """The whole weight; where there is one from before, `out`, its values are there already."""
        (data,), (scale, size) = all_gather_outputs, metadata
        if out is not None:
            weight = out._local_tensor if isinstance(out, DTensor) else out
            assert isinstance(weight, Float8Weight)
            weight.scale = scale
            return None
        # Views of what FSDP2 allocates and frees: there is nothing more for it to free.
        data8 = data.narrow(0, 0, size[0]).view(torch.float8_e4m3fn)
        return Float8Weight(data8, scale, param_dtype), ()


def gather_in_float8(model: nn.Module) -> int:
    """Have FSDP2 gather the weights of float8 layers in float8, from now on; return how many.

    For a model that apply_fsdp has sharded and that has its storage. Weights that no ranks share
    are not gathered.
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
    """Find the largest magnitude of each weight that is gathered in float8, all at once.

    For the forward passes until the next change of the weights; every rank must call it.
    """
    weights = [
        fsdp_param
        for fsdp_param in _sharded_weights(model)
        if isinstance(fsdp_param.sharded_param._local_tensor, Float8Shard)
    ]
    wanted = []
    for fsdp_param in weights:
        layer, parameter = fsdp_param._module_info.module, fsdp_param.sharded_param
        shard = _as_computed(
            parameter._local_tensor.as_subclass(torch.Tensor), fsdp_param.mp_policy.param_dtype
        )
        group = fsdp_param.mesh_info.mesh.get_group(-1).group_name
        wanted.append(
            (
                amax_of(shard.to(fsdp_param.device), None),
                _groups_of(layer, group, fsdp_param._orig_size),
            )
        )
    for fsdp_param, amax in zip(weights, reduce_max(wanted), strict=True):
        parameter = fsdp_param.sharded_param
        fsdp_param._module_info.module.precomputed = (amax, _version(parameter))


def _precomputed(layer: Float8Linear) -> Tensor | None:
    """The weight's largest magnitude, where it was found since the weight last changed."""
    if layer.precomputed is None:
        return None
    amax, version = layer.precomputed
    return amax if version == _version(layer.weight) else None


def _version(parameter: Any) -> tuple[int, int]:
    # An operator on the DTensor counts there, one on its local part here.
    return parameter._version, parameter._local_tensor._version


def _as_computed(shard: Tensor, param_dtype: torch.dtype | None) -> Tensor:
    """The shard in the dtype that is cast to float8 where it is gathered in that dtype."""
    return shard if param_dtype is None else shard.to(param_dtype)


def _groups_of(layer: Float8Linear, shards: str, local_size: torch.Size) -> Groups:
    """The groups whose ranks hold other parts of a weight: FSDP2's, and tp's where that cuts it."""
    is_cut = tuple(local_size) != (layer.out_features, layer.in_features)
    return (shards, *layer.groups.features) if is_cut else (shards,)


def _sharded_weights(model: nn.Module) -> list[Any]:
    """FSDP2's own records of the float8 layers' weights that it shards over several ranks."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            for fsdp_param in group.fsdp_params if group is not None else ():
                info = fsdp_param._module_info
                is_shared = fsdp_param.mesh_info.shard_mesh_size > 1
                if (
                    is_shared
                    and isinstance(info.module, Float8Linear)
                    and info.param_name == "weight"
                ):
                    found.append(fsdp_param)
    return found
