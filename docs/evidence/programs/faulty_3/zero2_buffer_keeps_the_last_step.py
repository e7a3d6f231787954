"""ZeRO-2 with gradient accumulation in a buffer that the first microbatch of a step should overwrite.

Thread: https://github.com/deepspeedai/DeepSpeed/pull/6550 "Fix gradient accumulation for Z2+offload",
2024-09-18 (micro_step_id is initialized and reset to different values, and gradients are copied or added at
the wrong microbatch).
Wrong: micro_step_id is 0 before the backward pass and is increased first, so `micro_step_id == 0` is never
true: the first microbatch of a step is added to the buffer, which still holds the previous step's sum.
A right diagnosis says: step 1 agrees; from step 2 on all gradients are wrong although loss and outputs of
step 2 agree: they are the step's own plus those of the step before (the accumulation buffer is not
cleared).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

ACCUMULATION = 2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        x = self.embed(x)
        return self.out(x + self.mlp(self.norm(x)))


class ZeroStage2:
    """keeps averaged gradients in buffers, which may live on the CPU"""

    def __init__(self, module):
        self.params = list(module.parameters())
        self.accumulated_grads = [torch.zeros_like(p) for p in self.params]
        self.micro_step_id = 0

    def backward(self, loss):
        self.micro_step_id += 1
        loss.backward()
        for p, buffer in zip(self.params, self.accumulated_grads):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            if self.micro_step_id == 0:
                buffer.copy_(p.grad)
            else:
                buffer.add_(p.grad)
            p.grad = None

    def set_grads_for_step(self):
        for p, buffer in zip(self.params, self.accumulated_grads):
            p.grad = buffer.clone()
        self.micro_step_id = 0


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def build():
    model = Encoder()
    return model, ZeroStage2(model)


def step(built, batch):
    model, zero = built
    total = 0
    for x, y in zip(batch["x"].chunk(ACCUMULATION), batch["y"].chunk(ACCUMULATION)):
        value = loss(model, {"x": x, "y": y}) / ACCUMULATION
        zero.backward(value)
        total += value.detach()
    zero.set_grads_for_step()
    return total


generator = torch.Generator().manual_seed(6550)
batches = [
    {"x": torch.randn(8, 5, generator=generator), "y": torch.randn(8, 2, generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Encoder, build, **options))
