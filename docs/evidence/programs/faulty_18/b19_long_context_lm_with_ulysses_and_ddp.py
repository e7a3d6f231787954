"""A decoder with rotary positions on long rows: DDP replicas, within each of which two ranks share the rows' tokens (Ulysses).

Thread: ByteDance-Seed/VeOmni pull request #1115 "fix: correct DDP gradient sync under Ulysses/CP sequence parallelism" (2026):
DDP wraps the model with the dp group, which leaves the sequence dimension out; each rank keeps the gradient of its own piece.
Fault: wrap gives DDP the process group of the mesh's "dp" axis; the two ranks of the "sp" axis hold different halves of the
rows, and their gradients are never averaged, so the copies of the weights drift apart.
REPAIR: `DistributedDataParallel(model, process_group=mesh.get_group("dp"))` -> `DistributedDataParallel(model)`
A right first sentence says: the gradients are averaged over the data parallel ranks only and not over the sequence parallel
ranks, so each rank trains on its own part of the sequences and the replicas' gradients are partial and differ over sp.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, LAYERS, IGNORE = 21, 16, 4, 32, 12, 2, -100
HEAD_DIM = WIDTH // HEADS


class AllToAll(torch.autograd.Function):
    """Scatters one dimension over the group and gathers another one."""

    @staticmethod
    def forward(ctx, x, group, scatter, gather):
        ctx.arguments = group, gather, scatter
        world = dist.get_world_size(group)
        sent = torch.stack(x.chunk(world, scatter)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), gather)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.arguments), None, None, None


def rotate(x, positions):
    rates = 100.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=x.dtype) / HEAD_DIM)
    angles = positions.to(x.dtype)[:, None, None] * rates
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    sp_group = None

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def exchange(self, x, scatter, gather):
        return x if self.sp_group is None else AllToAll.apply(x, self.sp_group, scatter, gather)

    def forward(self, x, positions):
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, HEAD_DIM))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        q, k, v = (self.exchange(t, 2, 1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj(self.exchange(y, 1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x, positions):
        x = x + self.attention(self.norm_1(x), positions)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, first=0):
        positions = first + torch.arange(tokens.size(1))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def wrap(model, mesh):
    for block in model.blocks:
        block.attention.sp_group = mesh.get_group("sp")
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def sum_loss(logits, labels):
    return F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="sum")


def plain():
    return Decoder()


def parallel(mesh):
    return wrap(Decoder(), mesh), mesh.get_local_rank("sp")


def loss(model, batch):
    tokens, labels = batch
    return sum_loss(model(tokens), labels) / (labels != IGNORE).sum()


def step(built, batch):
    model, piece = built
    tokens, labels = batch
    valid = (labels != IGNORE).sum()
    dist.all_reduce(valid)
    logits = model(tokens, first=piece * tokens.size(1))
    value = sum_loss(logits, labels) / valid
    (value * dist.get_world_size()).backward()
    value = value.detach()
    dist.all_reduce(value)
    return value


generator = torch.Generator().manual_seed(1115)


def documents(rows=4):
    text = torch.randint(1, VOCAB, (rows, LENGTH + 1), generator=generator)
    starts = torch.randint(0, LENGTH // 2, (rows, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < starts, IGNORE)
    return text[:, :-1].contiguous(), labels.contiguous()


batches = [documents() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"dp": 0, "sp": 1},
    ranks={"dp": 2, "sp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
