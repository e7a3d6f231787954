"""A byte language model in Megatron's (sequence, batch, hidden) layout: tensor parallel blocks, vocabulary parallel head.

Thread: NVIDIA/Megatron-LM issue #5337 "_reduce silently returns unreduced tensor when input is non-contiguous" (2026),
met in NovaSky-AI/SkyRL pull request #1886: the head copies the hidden states to the tensor parallel region first and
transposes them to (batch, sequence, hidden) afterwards, so the copy's backward pass gets a transposed gradient.
Fault: all_reduce_ reduces x.contiguous(), which is another tensor where x isn't contiguous, and returns x itself; the
gradient of the final hidden states is transposed, so each rank goes on with the part of its own vocabulary shard.
REPAIR: `dist.all_reduce(x.contiguous(), group=group)` -> `x = x.contiguous(); dist.all_reduce(x, group=group)`
A right first sentence says: the gradient that the vocabulary parallel head sends back into the final norm isn't summed
over the ranks, as all_reduce_ reduces a contiguous copy of the transposed gradient and returns the original; only the
head's own gradient is right, all others are partial and differ between the ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import titanlite

VOCAB, WIDTH, HEAD_DIM, HIDDEN, LENGTH, ROWS, LAYERS = 32, 16, 4, 32, 10, 3, 2


def all_reduce_(x, group):
    dist.all_reduce(x.contiguous(), group=group)
    return x


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        return all_reduce_(grad, ctx.group), None


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce_(x.clone(), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ColumnParallelLinear(nn.Module):
    def __init__(self, linear, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x):
        return F.linear(x, self.weight.to_local())


class RowParallelLinear(nn.Module):
    def __init__(self, linear, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(1)]))
        self.group = mesh.get_group()

    def forward(self, x):
        return ReduceFromRegion.apply(F.linear(x, self.weight.to_local()), self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )
        self.group = None

    def enter(self, x):
        return x if self.group is None else CopyToRegion.apply(x, self.group)

    def forward(self, x):
        y = self.enter(self.norm1(x))
        q, k, v = (
            w(y).unflatten(-1, (-1, HEAD_DIM)).permute(1, 2, 0, 3)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(F.gelu(self.up(self.enter(self.norm2(x)))))


class ByteLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.group = None

    def forward(self, tokens):
        """Logits, those of the rank's part of the vocabulary if there is a group."""
        x = self.words(tokens.t()) + self.positions.weight.unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.group is not None:
            x = CopyToRegion.apply(x, self.group)
        return self.head(x.transpose(0, 1).contiguous())


def parallelize(model, mesh):
    model.group = mesh.get_group()
    for block in model.blocks:
        block.group = model.group
        for name in ("wq", "wk", "wv", "up"):
            setattr(block, name, ColumnParallelLinear(getattr(block, name), mesh))
        for name in ("wo", "down"):
            setattr(block, name, RowParallelLinear(getattr(block, name), mesh))
    model.head = ColumnParallelLinear(model.head, mesh)
    return model


def vocab_parallel_cross_entropy(logits, targets, mesh):
    group, width = mesh.get_group(), logits.size(-1)
    top = logits.detach().amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    logits = logits - top.unsqueeze(-1)
    local = targets - mesh.get_local_rank() * width
    here = (local >= 0) & (local < width)
    picked = logits.gather(-1, local.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    picked = ReduceFromRegion.apply(picked.masked_fill(~here, 0.0), group)
    return (ReduceFromRegion.apply(logits.exp().sum(-1), group).log() - picked).mean()


def plain():
    return ByteLM()


def parallel(mesh):
    return parallelize(ByteLM(), mesh["tp"]), mesh["tp"]


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def step(built, batch):
    model, mesh = built
    value = vocab_parallel_cross_entropy(model(batch[:, :-1]), batch[:, 1:], mesh)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(5337)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, foreach=False),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
