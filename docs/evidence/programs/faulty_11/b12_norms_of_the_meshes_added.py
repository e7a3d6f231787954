"""Tensor parallelism and FSDP2 on four ranks: the gradients lie on two meshes, whose norms are combined for clipping.

Thread: of the kind nvidia-cosmos/cosmos-rl pull request #117 "Support gradient clipping with multiple meshes in the parameters"
(2025): "We have to group the parameters based on their meshes, collect the gradient norm from each mesh group followed by a
global reduction", and pytorch/torchtitan pull request #1541 "fix: ep clipping with no ep grads" (2025).
Fault: in clip, the norms of the two groups of gradients are added up, not their squares.
REPAIR: `total = sum(norms)` -> `total = torch.stack(norms).norm()`
A right first sentence says: loss and gradients agree before clipping; the gradient norm is too large on all ranks, as clip adds the
norms of the gradients on the mesh of dp and tp and of those on dp alone instead of taking the root of the sum of their squares, so
all gradients are clipped too much.
"""

from collections import defaultdict

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, MAX_NORM = 12, 8, 0.3


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 16, bias=False), nn.Linear(DIM, 16, bias=False)
        self.w2 = nn.Linear(16, DIM, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, DIM)
        self.feed_forward = FeedForward()

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.feed_forward(self.norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Transformer()
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer.feed_forward, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@torch.no_grad()
def clip(model):
    groups = defaultdict(list)
    for p in model.parameters():
        groups[p.device_mesh if isinstance(p, DTensor) else None].append(p)
    norms = []
    for parameters in groups.values():
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = sum(norms)
    for parameters in groups.values():
        nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, total)
    return total


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


rng = torch.Generator().manual_seed(416)
batches = []
for _ in range(2):
    rows = torch.randint(VOCAB, (4, 6), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Transformer, parallel
options = dict(batches=batches, loss=loss, clip=clip, ranks={"dp": 2, "tp": 2}, split="dp")
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
