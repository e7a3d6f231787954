"""FP8 with sequence parallelism: the largest magnitude is reduced over dp, not over tp.

Threads: https://github.com/NVIDIA/TransformerEngine/issues/335 "[Bug] scale_inv may be not
synchronized in TP group", 2023-07-21, and https://github.com/NVIDIA/Megatron-LM/pull/442 "Bug fix: Use
amax_reduction_group instead of data_parallel_group as fp8_group", 2023-08-01.
Wrong: the ranks of tp cast their parts of the sequence with scales of their own. The parts are gathered
in FP8, and each rank divides all of them by its own scale.
A right diagnosis says: layers.0.fc1 is the first module whose output differs (layers.0.norm agrees): its
input is wrong, namely the part of the sequence that comes from the other rank of tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, HIDDEN = 20, 16, 32
FP8, LARGEST = torch.float8_e4m3fn, 448.0


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


class CastAndGather(torch.autograd.Function):
    """Through FP8 and back; the gradient is not cast."""

    @staticmethod
    def forward(ctx, x, group, fp8_group):
        ctx.group = group
        amax = x.abs().max()
        if group:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=fp8_group)
        scale = LARGEST / amax
        cast = (x * scale).float().to(FP8)
        if group:
            cast = gather(cast.view(torch.uint8), group).view(FP8)
        return cast.to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group) if ctx.group else grad, None, None


class Layer(nn.Module):
    group = fp8_group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.fc2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        y = CastAndGather.apply(self.norm(x), self.group, self.fp8_group)
        y = self.fc2(gelu(self.fc1(y)))
        return x + (Move.apply(y, self.group, reduce_scatter, gather) if self.group else y)


class GPT(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = Move.apply(x, self.group, part, gather) if self.group else x
        for layer in self.layers:
            x = layer(x)
        return self.head(Move.apply(x, self.group, gather, part) if self.group else x)


def parallel(mesh):
    model, group = GPT(), mesh.get_group("tp")
    n, rank = mesh["tp"].size(), mesh.get_local_rank("tp")
    model.group = group
    for layer in model.layers:
        layer.group, layer.fp8_group = group, mesh.get_group("dp")
        layer.fc1.weight.data = layer.fc1.weight.data.chunk(n, 0)[rank].clone()
        layer.fc2.weight.data = layer.fc2.weight.data.chunk(n, 1)[rank].clone()
        for p in layer.norm.parameters():
            p.sequence_parallel = True
    return model, mesh


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(built, batch):
    model, mesh = built
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad, group=model.group)
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh["dp"].size()
    return value


def shard(name):
    if "fc1" in name:
        return 0, "tp"
    return (1, "tp") if "fc2" in name else None


generator = torch.Generator().manual_seed(20)
batches = [
    {name: torch.randint(VOCAB, (4, 8), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2, "tp": 2}, split="dp", step=step)
    print(titanlite.compare(GPT, parallel, shard=shard, **options))
