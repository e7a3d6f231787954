"""apply_ddp: one whole replica a rank, gradients summed in buckets while the backward pass runs."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh

from titanlite.parallelize.arguments import check_flags, check_mesh, check_model

BUCKET_CAP_MB = 100


def apply_ddp(model: nn.Module, replicate_mesh: DeviceMesh, *, compiled: bool = False) -> int:
    """Replicate `model` over the 1-D `replicate_mesh`; return the bucket size in MB.

    Where blocks are `compiled`, Dynamo's DDP optimizer is turned on: it splits graphs at bucket
    boundaries, so that reductions overlap with the backward pass of compiled code.

    Gradients are summed, not averaged: the loss is already divided by the tokens of the whole step.
    Parameters on the "meta" device must have been given storage and values first. Raises
    TitanliteError for an argument that is wrong.
    """
    check_model("apply_ddp", model)
    check_mesh("apply_ddp", "replicate_mesh", replicate_mesh)
    check_flags("apply_ddp", compiled=compiled)
    if compiled:
        torch._dynamo.config.optimize_ddp = "ddp_optimizer"
    replica: Any = replicate(model, device_mesh=replicate_mesh, bucket_cap_mb=BUCKET_CAP_MB)
    replica.register_comm_hook(replicate_mesh.get_group(), _sum_bucket)
    _fix_layout(replica)
    return BUCKET_CAP_MB


def _fix_layout(replica: Any) -> None:
    """Lay the buckets out once, before the first step, in reverse order of the parameters.

    DDP would do so after the first backward pass, by when gradients arrived. Where in a bucket a
    gradient lies decides in which order the ranks' values are added, so that a run that goes on
    from a checkpoint would differ in the last bit from the one that was never stopped.
    """
    state = replicate.state(replica)
    state._param_list = _LastFirst()

    def lay_out(*_: Any) -> None:
        state._ddp.reducer._push_all_rebuilt_params()
        state._ddp.reducer._rebuild_buckets()
        hook.remove()

    # DDP itself is made at the first forward pass, by a hook that runs before this one.
    hook = replica.register_forward_pre_hook(lay_out)


class _LastFirst(nn.ParameterList):
    """Parameters in the order in which their gradients arrive, near enough: the last one first."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(list(super().named_parameters(*args, **kwargs))[::-1])


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
