"""Gradients clipped on each rank before they are averaged.

Thread: https://github.com/determined-ai/determined/pull/602 "fix: synchronize before gradient
clipping in PyTorch", 2020-05-28; also https://github.com/huggingface/diffusers/pull/721 (2022-10-04).
Wrong: each rank clips by the norm of its own gradient; the clipped gradients are averaged then.
A right diagnosis says: the gradients are averages of the ranks' contributions with wrong
coefficients: each rank's was scaled (clipped) by its own factor before the average over dp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

CLIP = 0.5


def build_model():
    return nn.Sequential(
        nn.Linear(8, 32),
        nn.Tanh(),
        nn.LayerNorm(32),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 2),
    )


def build_parallel():
    model = build_model()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return model


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def train_batch(model, batch):
    value = loss(model, batch)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    average_gradients(model)
    return value


generator = torch.Generator().manual_seed(7)
batches = [
    {"x": torch.randn(8, 8, generator=generator), "y": torch.randn(8, 2, generator=generator) * 3}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            build_model,
            build_parallel,
            batches=batches,
            loss=loss,
            ranks={"dp": 2},
            split="dp",
            step=train_batch,
            clip=clip,
        )
    )
