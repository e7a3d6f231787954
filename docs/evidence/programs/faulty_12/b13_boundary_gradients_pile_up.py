"""A pipeline of three stages by hand that receives its activations in buffers allocated once.

Thread: deepspeedai/DeepSpeed pull request #4128 "Fix requires_grad of input must be true for activation checkpoint layer in
pipeline train." (2023), a review of the line that zeroes the gradients of the pipe's inputs "each time we use the tensor because
only the data in tensor changes"; pytorch/pytorch issue #136380 "[pipelining] Improve recv buffer management" (2024).
Fault: in Stage.receive, the buffer itself is the leaf of every microbatch that uses it, and its gradient is never cleared, so the
gradient sent to the stage before contains those of the earlier microbatches in the same buffer.
REPAIR: `self.inputs[slot].requires_grad_()` -> `self.inputs[slot].detach().requires_grad_()`
A right first sentence says: loss and gradients of the last stage agree, those of layers 0 to 3 on the first two stages are wrong
from the second use of a buffer on: the gradient of the receive buffer accumulates over the microbatches, as Stage.receive reuses
the same leaf without clearing its .grad.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, mse_loss

import titanlite

INPUTS, WIDTH, STAGES, MICROBATCHES, IN_FLIGHT, ROWS = 4, 8, 3, 6, 2, 2


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        middle = [Residual() for _ in range(4)]
        self.layers = nn.ModuleList([nn.Linear(INPUTS, WIDTH), *middle, nn.Linear(WIDTH, 1)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


class Stage(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        self.index, self.first, self.last = index, index == 0, index == STAGES - 1
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in (2 * index, 2 * index + 1)})
        self.inputs = [torch.zeros(ROWS, WIDTH) for _ in range(IN_FLIGHT)]

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x

    def receive(self, slot):
        x = self.inputs[slot].requires_grad_()
        dist.recv(x.data, self.index - 1)
        return x


def parallel(mesh):
    return Stage(Tabular(), mesh.get_local_rank("pp"))


def step(stage, batch):
    xs, ys = batch["x"].chunk(MICROBATCHES), batch["y"].chunk(MICROBATCHES)
    total = 0
    for start in range(0, MICROBATCHES, IN_FLIGHT):
        kept = []
        for slot in range(IN_FLIGHT):
            x = xs[start + slot] if stage.first else stage.receive(slot)
            out = stage(x)
            if stage.last:
                out = mse_loss(out, ys[start + slot]) / MICROBATCHES
                total += out.detach()
            else:
                dist.send(out.detach(), stage.index + 1)
            kept.append((x, out))
        for x, out in kept:
            grad = None
            if not stage.last:
                grad = torch.empty_like(out)
                dist.recv(grad, stage.index + 1)
            out.backward(grad)
            if not stage.first:
                dist.send(x.grad, stage.index - 1)
    return total if stage.last else None


rng = torch.Generator().manual_seed(502)
batches = [
    {"x": torch.randn(12, INPUTS, generator=rng), "y": torch.randn(12, 1, generator=rng)}
    for _ in range(3)
]
arguments = Tabular, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
