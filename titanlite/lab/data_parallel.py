"""Data parallelism by hand: every rank has the whole model and its own part of the batch.

The only difference from training in one process is one all-reduce per gradient. With `overlap`,
each all-reduce starts as soon as autograd has computed the gradient, and overlaps the backward of
the layers below, as in DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704,
section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlite.lab.lecture import (
    LEARNING_RATE,
    TrainingRecord,
    cleanup,
    get_device,
    get_init_params,
    gradients_of,
    int_divide,
    setup,
    state_bytes,
    values_of,
)


def data_parallelism_main(
    rank: int,
    world_size: int,
    data: torch.Tensor,
    num_layers: int,
    num_steps: int,
    *,
    overlap: bool = False,
) -> TrainingRecord:
    """Train on this rank's equal share of the rows of `data` (batch, num_dim); average gradients.

    The mean of the ranks' gradients is the gradient of the global mean only if all parts have the
    same size. Raises ValueError if the batch does not divide evenly.
    """
    setup(rank, world_size)
    local_batch_size = int_divide(data.size(0), world_size)
    num_dim = data.size(1)
    start_index = rank * local_batch_size
    data = data[start_index : start_index + local_batch_size].to(get_device(rank))

    params = [
        get_init_params(num_dim, num_dim, rank, layer=i, dtype=data.dtype)
        for i in range(num_layers)
    ]
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE)
    record = TrainingRecord()
    works: list[Any] = []

    def start_all_reduce(param: torch.Tensor) -> None:
        assert param.grad is not None
        works.append(dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, async_op=True))

    if overlap:
        for param in params:
            param.register_post_accumulate_grad_hook(start_all_reduce)

    for step in range(num_steps):
        with record.step():
            optimizer.zero_grad()
            x = data
            for param in params:
                x = F.gelu(x @ param)
            loss = x.square().mean()
            loss.backward()

            if not overlap:
                for param in params:
                    start_all_reduce(param)
            with record.waiting():
                for work in works:
                    work.wait()
            works.clear()
            if step == 0:
                record.gradients = gradients_of(enumerate(params))
            optimizer.step()
            record.held_bytes = {
                "parameters": sum(param.nbytes for param in params),
                "gradients": sum(param.grad.nbytes for param in params if param.grad is not None),
                "optimizer": state_bytes(optimizer),
            }
        record.losses.append(loss.item())
    record.params = values_of(enumerate(params))
    cleanup()
    return record
