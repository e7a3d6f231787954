"""Sharded weights with a second copy within the node, as in ZeRO++: the copy is not thrown away when the weights change.

Thread: deepspeedai/DeepSpeed pull request #4288 "Keep hpz secondary tensor in forward pass" (2023), where a reviewer asks
whether the weight update by step does not invalidate the cached secondary tensor.
Fault: in step, the layers are released after the backward pass with their secondary copies kept, so from the second step
on the weights are gathered from copies of the weights of the first step.
REPAIR: `layer.release(keep_secondary=True)` -> `layer.release(keep_secondary=False)`
Expected: step 1 agrees with its update; in step 2, layers.0 is the first module whose output differs, on all ranks,
although its weight shards are right: the forward pass still uses the weights of before the optimizer step of step 1, from
a copy that is kept within the node. Throw the secondary copy away after each step.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear

import titanlite

FEATURES, HIDDEN, CLASSES = 6, 16, 4


class FullWeight(torch.autograd.Function):
    """The whole weight; in backward, the mean gradient of the own shard."""

    @staticmethod
    def forward(ctx, shard, layer):
        ctx.layer = layer
        return layer.gather(shard.detach())

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return ctx.layer.own(total) / dist.get_world_size(), None


class HierarchicalLinear(nn.Module):
    """The weight's rows are cut over all ranks; a second copy is cut over the ranks of the node only."""

    def __init__(self, whole, mesh):
        super().__init__()
        self.mesh, self.node = mesh, mesh.get_group("gpu")
        self.weight = nn.Parameter(self.own(whole.weight.detach()).clone())
        self.secondary = None

    def own(self, tensor):
        for axis in ("node", "gpu"):
            tensor = tensor.chunk(self.mesh[axis].size())[self.mesh.get_local_rank(axis)]
        return tensor

    def gather(self, shard):
        if self.secondary is None:
            parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, shard)
            whole = torch.cat(parts)
            self.secondary = whole.chunk(self.mesh["gpu"].size())[self.mesh.get_local_rank("gpu")]
            return whole
        parts = [torch.empty_like(self.secondary) for _ in range(self.mesh["gpu"].size())]
        dist.all_gather(parts, self.secondary.contiguous(), group=self.node)
        return torch.cat(parts)

    def release(self, keep_secondary):
        if not keep_secondary:
            self.secondary = None

    def forward(self, x):
        return linear(x, FullWeight.apply(self.weight, self))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [FEATURES, HIDDEN, HIDDEN]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Classifier()
    model.layers = nn.ModuleList(HierarchicalLinear(layer, mesh) for layer in model.layers)
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for layer in model.layers:
        layer.release(keep_secondary=True)
    for p in model.head.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


def split(batch, mesh):
    return {key: value.chunk(4)[dist.get_rank()] for key, value in batch.items()}


def shard(name):
    return [(0, "node"), (0, "gpu")] if name.startswith("layers.") else None


generator = torch.Generator().manual_seed(204)


def draw():
    x = torch.randn(16, FEATURES, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (16,), generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Classifier, parallel
options = dict(
    batches=batches, loss=loss, step=step, ranks={"node": 2, "gpu": 2}, split=split, shard=shard
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
