"""Tensor parallelism by hand: every rank has a shard of every layer and all of the data.

Layers are sharded by columns: a rank computes its columns of gelu(x W), and an all-gather
concatenates them for the next layer. The backward pass also needs one collective per layer: every
rank's columns contribute to the gradient of x, so the contributions are all-reduced. The two
conjugate operators are Megatron-LM's g and f (https://arxiv.org/abs/1909.08053, section 3).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import record_function

from titanlite.tools.lab import lecture
from titanlite.tools.lab.communicator import Communicator, TorchCommunicator


def tensor_parallelism_main(
    rank: int,
    world_size: int,
    data: torch.Tensor,
    num_layers: int,
    *,
    num_steps: int = 1,
    overlap: bool = False,
    communicator: Communicator | None = None,
) -> lecture.TrainingRecord:
    """Train on all of `data` (batch, num_dim) with an equal share of the columns of each layer.

    L layers take L all-gathers forward and L-1 all-reduces backward, since the data needs no
    gradient. With `overlap`, each all-reduce overlaps the weight gradient of the same layer. Raises
    ValueError if num_dim does not divide evenly.
    """
    lecture.setup(rank, world_size)
    communicator = communicator or TorchCommunicator()
    data = data.to(lecture.get_device(rank))
    params = lecture.get_layers(data, range(num_layers), rank, shard=rank, num_shards=world_size)
    record = lecture.TrainingRecord()

    def forward_and_backward() -> torch.Tensor:
        x = data
        for param in params.values():
            x = tensor_parallel_layer(x, param, record, communicator, overlap=overlap)
        # Every rank has all of x, so all have the same loss.
        loss = x.square().mean()
        loss.backward()
        return loss.detach()

    lecture.train(record, params, num_steps, forward_and_backward)
    lecture.cleanup()
    return record


def tensor_parallel_layer(
    x: torch.Tensor,
    param: torch.Tensor,
    record: lecture.TrainingRecord,
    communicator: Communicator,
    *,
    overlap: bool = False,
) -> torch.Tensor:
    """The full gelu(x W) on every rank, where each rank has some columns of W."""
    columns = F.gelu(ColumnParallel.apply(x, param, communicator, record, overlap))
    return AllGatherColumns.apply(columns, communicator, record)


class ColumnParallel(torch.autograd.Function):
    """x times this rank's columns of W. The backward all-reduces the partial dx (f)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        param: torch.Tensor,
        communicator: Communicator,
        record: lecture.TrainingRecord,
        overlap: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, param)
        ctx.communicator, ctx.record, ctx.overlap = communicator, record, overlap
        with record_function("x A"):
            return x @ param

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, param = ctx.saved_tensors
        (dy,) = gradients
        work, dx = None, None
        if ctx.needs_input_grad[0]:
            with record_function("dy A^T"):
                dx = dy @ param.T
            work = ctx.communicator.all_reduce(dx)
            if not ctx.overlap:
                with ctx.record.waiting():
                    work.wait()
        with record_function("x^T dy"):
            dparam = x.T @ dy
        if work is not None and ctx.overlap:
            with ctx.record.waiting():
                work.wait()
        return dx, dparam, None, None, None


class AllGatherColumns(torch.autograd.Function):
    """All-gather the columns. The backward keeps the gradient of this rank's own columns (g).

    The backward needs no communication: all ranks run the same computation on the gathered tensor,
    so each already has the whole gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, columns: torch.Tensor, communicator: Communicator, record: lecture.TrainingRecord
    ) -> torch.Tensor:
        ctx.communicator = communicator
        activations = [torch.empty_like(columns) for _ in range(communicator.size)]
        with record.waiting():
            communicator.all_gather(activations, columns.contiguous()).wait()
        return torch.cat(activations, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mine = gradients[0].chunk(ctx.communicator.size, dim=1)
        return mine[ctx.communicator.rank].contiguous(), None, None
