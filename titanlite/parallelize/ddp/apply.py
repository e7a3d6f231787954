"""apply_ddp: replicate the model; gradients are reduced in buckets during the backward pass."""

# No `from __future__ import annotations`: torch checks the types of a hook's annotations.
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh

from titanlite.parallelize.arguments import check_flags, check_mesh, check_model
from titanlite.ranks import settings

BUCKET_CAP_MB = 100


@dataclass(frozen=True)
class DDPReport:
    """What apply_ddp did: the largest size of a bucket of gradients, in MB."""

    bucket_cap_mb: int


def apply_ddp(model: nn.Module, replicate_mesh: DeviceMesh, *, compiled: bool = False) -> DDPReport:
    """Replicate `model` over the 1-D `replicate_mesh`.

    Gradients are summed, as by apply_fsdp. `compiled` enables Dynamo's DDP optimizer, with which
    reductions overlap with the backward pass of compiled blocks. Raises TitanliteError for an
    invalid argument; parameters must not be on the "meta" device.
    """
    check_model("apply_ddp", model)
    check_mesh("apply_ddp", "replicate_mesh", replicate_mesh)
    check_flags("apply_ddp", compiled=compiled)
    if compiled:
        settings.change(settings.DDP_GRAPHS, "ddp_optimizer")
    replica: Any = replicate(model, device_mesh=replicate_mesh, bucket_cap_mb=BUCKET_CAP_MB)
    replica.register_comm_hook(replicate_mesh.get_group(), _sum_bucket)
    _fix_layout(replica)
    return DDPReport(BUCKET_CAP_MB)


def _fix_layout(replica: Any) -> None:
    """Fix the bucket layout before the first step, in reverse order of the parameters.

    DDP would rebuild its buckets after the first backward pass, in the order in which gradients
    arrived. The position of a gradient in its bucket determines the order in which the ranks'
    values are added. A resumed run would then differ in the last bit from an uninterrupted one.
    """
    state = replicate.state(replica)
    state._param_list = _LastFirst()

    def lay_out(*_: Any) -> None:
        state._ddp.reducer._push_all_rebuilt_params()
        state._ddp.reducer._rebuild_buckets()
        hook.remove()

    # A hook that runs before this one creates the DDP object at the first forward pass.
    hook = replica.register_forward_pre_hook(lay_out)


class _LastFirst(nn.ParameterList):
    """Parameters in reverse order, which is about the order in which their gradients arrive."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(list(super().named_parameters(*args, **kwargs))[::-1])


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
