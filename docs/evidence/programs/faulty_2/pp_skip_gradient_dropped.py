"""A U-shaped network as a pipeline: the skip connection is sent, its gradient is not sent back.

Thread: https://github.com/deepspeedai/DeepSpeedExamples/issues/932 "Does DeepSpeed's Pipeline-Parallelism
optimizer supports skip connections?", 2024-10-17.
Wrong: stage 1 returns the gradient of the bottleneck only. The part of the gradient that reaches
down1's output through the skip connection is lost.
A right diagnosis says: on stage 0 the gradients of down1 (and of what is before it) are wrong, as the
gradient of down1's output lacks what comes through the skip from stage 1; down2 and all of stage 1 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

FEATURES, WIDE, NARROW, MICROBATCHES = 6, 24, 12, 2


class Down(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.linear, self.norm = nn.Linear(fan_in, fan_out), nn.LayerNorm(fan_out)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))


class Up(nn.Module):
    def __init__(self, fan_in, skip, fan_out):
        super().__init__()
        self.linear = nn.Linear(fan_in + skip, fan_out)

    def forward(self, x, skip):
        return torch.tanh(self.linear(torch.cat([x, skip], -1)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDE)
        self.down1, self.down2 = Down(WIDE, WIDE), Down(WIDE, NARROW)
        self.mid = Down(NARROW, NARROW)
        self.up = Up(NARROW, WIDE, WIDE)
        self.out = nn.Linear(WIDE, FEATURES)

    def forward(self, x):
        skip = self.down1(self.stem(x))
        return self.out(self.up(self.mid(self.down2(skip)), skip))


class Encoder(nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.stem, self.down1, self.down2 = unet.stem, unet.down1, unet.down2

    def forward(self, x):
        skip = self.down1(self.stem(x))
        return self.down2(skip), skip


class Decoder(nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.mid, self.up, self.out = unet.mid, unet.up, unet.out

    def forward(self, x, skip):
        return self.out(self.up(self.mid(x), skip))


def build_pipeline(mesh):
    return Encoder(UNet()) if mesh.get_local_rank("pp") == 0 else Decoder(UNet())


def train_batch(module, batch):
    inputs, targets = batch["x"].chunk(MICROBATCHES), batch["y"].chunk(MICROBATCHES)
    if isinstance(module, Encoder):
        outputs = []
        for x in inputs:
            y, skip = module(x)
            dist.send(y.detach(), 1)
            dist.send(skip.detach(), 1)
            outputs.append(y)
        for y in outputs:
            grad = torch.empty_like(y)
            dist.recv(grad, 1)
            y.backward(grad)
        return None
    pending, losses = [], []
    for target in targets:
        y, skip = torch.empty(len(target), NARROW), torch.empty(len(target), WIDE)
        dist.recv(y, 0)
        dist.recv(skip, 0)
        y.requires_grad_()
        losses.append(mse_loss(module(y, skip), target) / MICROBATCHES)
        pending.append(y)
    for y, value in zip(pending, losses):
        value.backward()
        dist.send(y.grad, 0)
    return torch.stack(losses).sum().detach()


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(33)
batches = [
    {name: torch.randn(8, FEATURES, generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=train_batch)
    print(titanlite.compare(UNet, build_pipeline, **options))
