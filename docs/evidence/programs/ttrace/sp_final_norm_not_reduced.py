"""Tensor and sequence parallelism: the final norm's gradients are not summed over tp.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1446 "[BUG] final_layernorm gradient mismatch
when TP+SP enabled", 2025-03-04.
Wrong: the norms of the layers are marked sequence_parallel, the final one is not. Each rank of tp
keeps the gradient of its own part of the sequence.
A right diagnosis says: the gradients of final_layernorm (weight and bias) are correct only after a
sum over tp; add the missing all-reduce.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, HIDDEN = 20, 16, 32


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def part(x, group):
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def reduce_scatter(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return part(x, group)


class Move(torch.autograd.Function):
    """`there` in the forward pass, `back` in the backward pass."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, ctx.group), None, None, None


class Mlp(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        x = Move.apply(x, self.group, gather, reduce_scatter) if self.group else x
        x = self.fc2(gelu(self.fc1(x)))
        return Move.apply(x, self.group, reduce_scatter, gather) if self.group else x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.mlp = nn.LayerNorm(DIM), Mlp()

    def forward(self, x):
        return x + self.mlp(self.input_layernorm(x))


class GPT(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.final_layernorm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = Move.apply(x, self.group, part, gather) if self.group else x
        for layer in self.layers:
            x = layer(x)
        x = self.final_layernorm(x)
        return self.head(Move.apply(x, self.group, gather, part) if self.group else x)


def parallel(mesh):
    model, group = GPT(), mesh.get_group("tp")
    n, rank = mesh["tp"].size(), mesh.get_local_rank("tp")
    model.group = group
    for layer in model.layers:
        mlp = layer.mlp
        mlp.group = group
        for tensor, dim in ((mlp.fc1.weight, 0), (mlp.fc1.bias, 0), (mlp.fc2.weight, 1)):
            tensor.data = tensor.data.chunk(n, dim)[rank].clone()
        for p in layer.input_layernorm.parameters():
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


generator = torch.Generator().manual_seed(12)
batches = [
    {name: torch.randint(VOCAB, (3, 8), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(GPT, parallel, batches=batches, loss=loss, ranks={"tp": 2}, step=step))
