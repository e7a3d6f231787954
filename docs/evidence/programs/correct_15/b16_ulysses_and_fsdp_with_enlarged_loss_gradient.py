"""A small Llama-like model with Ulysses sequence parallelism under FSDP2, whose loss reduction enlarges the gradient.

Thread: ByteDance-Seed/VeOmni pull request #1079 "drop spurious sp_world_size factor in ReduceLoss backward" (2026), which wrongly
took the factor for a mistake and was closed: it compensates for FSDP2, which divides by dp x sp ranks.
Correct: ReduceLoss makes the mean over the tokens of a sequence group, and its backward pass multiplies by the size of that
group, which isn't its true gradient. fully_shard gets the flattened mesh of dp and sp and averages over all of its ranks, though
the shards of a sequence have to be summed. The loss is weighted by the group's share of the batch's tokens, times dp, for the
same reason.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCABULARY, WIDTH, HEADS, LENGTH = 13, 16, 4, 8


def rotary(x, position):
    half = x.size(-1) // 2
    angles = position[..., None, None] / 100.0 ** (torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.group = None

    def forward(self, x, position):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = rotary(q, position), rotary(k, position)
        if self.group is not None:
            q, k, v = (AllToAll.apply(y, 2, 1, self.group) for y in (q, k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = AllToAll.apply(y, 1, 2, self.group)
        return self.out(y.flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, position):
        x = x + self.attention(self.norm1(x), position)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, position):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, position)
        return self.head(self.norm(x))


class AllToAll(torch.autograd.Function):
    """Cuts dimension `scatter` over the group and joins dimension `gather`."""

    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        ctx.arguments = gather, scatter, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), scatter))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), gather)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.arguments), None, None, None


class ReduceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean, count, group):
        both = torch.stack([mean * count, count.to(mean.dtype)])
        dist.all_reduce(both, group=group)
        ctx.weight = count / both[1] * dist.get_world_size(group)
        return both[0] / both[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.weight, None, None


def plain():
    return Llama()


def parallel(mesh):
    model = Llama()
    for block in model.blocks:
        block.attention.group = mesh.get_group("sp")
    everyone = mesh["dp", "sp"]._flatten("dp_sp")
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    return fully_shard(model, mesh=everyone), mesh


def loss(model, batch):
    logits = model(batch["tokens"], batch["position"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def step(built, batch):
    model, mesh = built
    count = (batch["targets"] != -100).sum()
    value = ReduceLoss.apply(loss(model, batch), count, mesh.get_group("sp"))
    dist.all_reduce(count, group=mesh.get_group("sp"))
    everything = count.clone()
    dist.all_reduce(everything, group=mesh.get_group("dp"))
    value = value * count / everything * mesh["dp"].size()
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(1079)


def draw():
    stream = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    targets = stream[:, 1:].clone()
    prompt = torch.randint(0, LENGTH // 2, (4, 1), generator=generator)
    targets[torch.arange(LENGTH)[None] < prompt] = -100
    return {
        "tokens": stream[:, :-1].clone(),
        "targets": targets,
        "position": torch.arange(LENGTH).repeat(4, 1),
    }


batches = [draw() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, step=step, split={"dp": 0, "sp": 1}, ranks={"dp": 2, "sp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
