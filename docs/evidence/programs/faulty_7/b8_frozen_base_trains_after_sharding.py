"""LoRA under tensor parallelism: the frozen base weight is sharded into a new parameter, which is not frozen.

Thread: pytorch/pytorch#171523, "requires_grad state lost when converting parameters to distributed tensors" in
distribute_module and ColwiseParallel; the same in hand-written layers (nn.Parameter of a slice) since 2022.
Wrong: nn.Parameter(slice) requires a gradient by default. up.weight and down.weight of the base, frozen in the plain
model, are trained on the ranks. Loss and all gradients of step 1 that both sides have are right.
PLACE: blocks.*.up.weight and blocks.*.down.weight (not lora_*), backward pass and optimizer step
KIND: requires_grad=False lost by sharding: a frozen parameter gets gradients and is updated
REPAIR: `return nn.Parameter(piece)` -> `return nn.Parameter(piece, requires_grad=weight.requires_grad)`
EXPECT: blocks.0.up.weight, blocks.0.down.weight, blocks.1.up.weight and blocks.1.down.weight are frozen in the plain
model (requires_grad is False) and have gradients and are updated in the parallel model, on all ranks. Everything else
agrees in step 1. Keep requires_grad when the weights are cut.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HIDDEN, RANK = 12, 8, 16, 2


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)
        self.lora_a, self.lora_b = (
            nn.Linear(DIM, RANK, bias=False),
            nn.Linear(RANK, DIM, bias=False),
        )
        for module in (self.up, self.down):
            module.weight.requires_grad = False

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.lora_b(self.lora_a(x))


def cut(weight, dim, group):
    piece = weight.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()
    return nn.Parameter(piece)


class ParallelMlp(Mlp):
    def __init__(self, whole, group):
        super().__init__()
        self.group = group
        self.up.weight = cut(whole.up.weight, 0, group)
        self.down.weight = cut(whole.down.weight, 1, group)
        self.lora_a, self.lora_b = whole.lora_a, whole.lora_b

    def forward(self, x):
        base = self.down(torch.relu(self.up(Copy.apply(x, self.group))))
        return Sum.apply(base, self.group) + self.lora_b(self.lora_a(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    model.blocks = nn.ModuleList(ParallelMlp(block, group) for block in model.blocks)
    return model


def shard(name):
    if name.endswith("up.weight"):
        return 0, "tp"
    return (1, "tp") if name.endswith("down.weight") else None


generator = torch.Generator().manual_seed(7)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
