"""Sequence parallelism: the gradients of a mixture of experts' router are not summed over tp.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/599 "[BUG] SwitchMLP router weights are not
synchronized within the tensor parallelism group", 2023-11-20; fix in pull request 619.
Wrong: the router is not marked sequence_parallel, so each rank of tp keeps the gradient of its own
part of the sequence. Norms and experts are marked.
A right diagnosis says: the gradients of layers.*.mlp.router.weight are correct only after a sum over
tp; add the missing all-reduce.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import titanlite

VOCAB, DIM, EXPERTS = 20, 16, 3


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class SwitchMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))

    def forward(self, x):
        probability, index = self.router(x).softmax(-1).max(-1)
        outputs = torch.stack([torch.tanh(expert(x)) for expert in self.experts], -2)
        chosen = (outputs * one_hot(index, EXPERTS).unsqueeze(-1)).sum(-2)
        return probability.unsqueeze(-1) * chosen


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), SwitchMLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class GPT(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = Scatter.apply(x, self.group) if self.group else x
        for layer in self.layers:
            x = layer(x)
        return self.head(Gather.apply(x, self.group) if self.group else x)


def parallel(mesh):
    model = GPT()
    model.group = mesh.get_group("tp")
    for layer in model.layers:
        for p in (*layer.norm.parameters(), *layer.mlp.experts.parameters()):
            p.sequence_parallel = True
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad, group=model.group)
    return value


generator = torch.Generator().manual_seed(11)
batches = [
    {name: torch.randint(VOCAB, (3, 8), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(GPT, parallel, batches=batches, loss=loss, ranks={"tp": 2}, step=step))
