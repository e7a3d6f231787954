"""A graph network, data parallel by hand: gradients are reduced in buckets during the backward pass, in two buffers by turns.

Thread: EleutherAI/gpt-neox issue #1004 "[BUG] Inconsistent loss between `overlap_comm=true` and `overlap_comm=false`" (2023) and
deepspeedai/DeepSpeed issue #5545 "[BUG] deepspeed overlap_comm data race" (2024): the two buffers of gradients of ZeRO-2.
Fault: in Buckets.launch, the reduction of the bucket before the last is waited for, but its result is not copied out before its
buffer is filled again, so the parameters of all buckets but the last two get gradients of a later bucket.
REPAIR: `self.flying[-2].work.wait()` -> `self.flying.pop(0).land()`
A right first sentence says: the losses of the first step agree; the gradients of the layers that come late in the backward pass
(embed and layers.0) agree, those of readout and of the last layers are wrong, equally on all ranks: they hold values of other
parameters' gradients, because Buckets.launch reuses a buffer before its bucket has been copied back.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import elu, smooth_l1_loss

import titanlite

ATOMS, WIDTH, CAPACITY = 5, 7, 120


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.near = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, edges):
        near = edges @ x / edges.sum(-1, keepdim=True).clamp(min=1)
        return x + elu(self.own(self.norm(x)) + self.near(near))


class Molecule(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ATOMS, WIDTH)
        self.layers = nn.ModuleList(Convolution() for _ in range(3))
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))

    def forward(self, atoms, edges):
        x = self.embed(atoms)
        for layer in self.layers:
            x = layer(x, edges)
        return self.readout(x.sum(1))


@dataclass
class Bucket:
    work: dist.Work
    buffer: torch.Tensor
    members: list

    def land(self):
        self.work.wait()
        for p, start in self.members:
            p.grad.copy_(self.buffer[start : start + p.numel()].view_as(p) / dist.get_world_size())


class Buckets:
    def __init__(self, model):
        self.buffers = [torch.zeros(CAPACITY) for _ in range(2)]
        self.turn, self.used, self.members, self.flying = 0, 0, [], []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.collect)

    def collect(self, p):
        if self.used + p.numel() > CAPACITY:
            self.launch()
        self.buffers[self.turn][self.used : self.used + p.numel()] = p.grad.flatten()
        self.members.append((p, self.used))
        self.used += p.numel()

    def launch(self):
        buffer = self.buffers[self.turn]
        work = dist.all_reduce(buffer[: self.used], async_op=True)
        self.flying.append(Bucket(work, buffer, self.members))
        self.turn, self.used, self.members = 1 - self.turn, 0, []
        if len(self.flying) > 1:
            self.flying[-2].work.wait()

    def finish(self):
        self.launch()
        for bucket in self.flying:
            bucket.land()
        self.flying.clear()


def loss(model, batch):
    return smooth_l1_loss(model(batch["atoms"], batch["edges"]), batch["energies"])


def parallel(mesh):
    model = Molecule()
    return model, Buckets(model)


def step(built, batch):
    model, buckets = built
    value = loss(model, batch)
    value.backward()
    buckets.finish()
    return value.detach()


rng = torch.Generator().manual_seed(503)
batches = []
for _ in range(3):
    upper = (torch.rand(9, 6, 6, generator=rng) < 0.4).double().triu(1)
    atoms = torch.randint(ATOMS, (9, 6), generator=rng)
    batches.append(
        {"atoms": atoms, "edges": upper + upper.mT, "energies": torch.randn(9, 2, generator=rng)}
    )
arguments = Molecule, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 3}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
