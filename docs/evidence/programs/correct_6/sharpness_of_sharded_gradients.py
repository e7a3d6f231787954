"""Sharpness-aware minimization under FSDP2: every rank moves its shards, by the norm of the whole gradient.

Thread: https://github.com/facebookresearch/fairscale/issues/989 "How to use Optimizer State Sharding with
Sharpness-Aware Minimization?" (comment of 2022-06-09).
Right: the first backward pass leaves reduced gradients in the shards. Their squares are summed over dp, the shards
are moved and moved back, and the second pass gathers the moved weights.
Must not be accused: two forward and backward passes in a step with other weights, a loss that is not that of the
weights before or after the step, sharded weights that are written to between the passes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, CLASSES, RHO = 15, 10, 3, 0.3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class TextClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, CLASSES)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def criterion(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"])


def loss(model, batch):
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(criterion(model, batch), list(parameters.values()))
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    moved = {n: p + RHO * g / norm for (n, p), g in zip(parameters.items(), grads)}
    return criterion(lambda tokens: functional_call(model, moved, (tokens,)), batch)


class ShardedSAM:
    def __init__(self, model, group):
        self.model, self.group = model, group

    @torch.no_grad()
    def ascend(self):
        parameters = list(self.model.parameters())
        grads = [p.grad.to_local() for p in parameters]
        norm = torch.stack([g.square().sum() for g in grads]).sum()
        dist.all_reduce(norm, group=self.group)
        self.saved = [p.to_local().clone() for p in parameters]
        for p, g in zip(parameters, grads):
            p.to_local().add_(RHO * g / norm.sqrt())

    @torch.no_grad()
    def descend(self):
        for p, old in zip(self.model.parameters(), self.saved):
            p.to_local().copy_(old)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def parallel(mesh):
    model = TextClassifier()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, ShardedSAM(model, mesh.get_group("dp"))


def step(built, batch):
    model, sam = built
    criterion(model, batch).backward()
    sam.ascend()
    model.zero_grad()
    value = criterion(model, batch)
    value.backward()
    sam.descend()
    return value.detach()


generator = torch.Generator().manual_seed(989)
batches = [
    {
        "tokens": torch.randint(VOCAB, (12, 5), generator=generator),
        "labels": torch.randint(CLASSES, (12,), generator=generator),
    }
    for _ in range(3)
]
arguments = TextClassifier, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
