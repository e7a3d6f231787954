"""Tensor parallelism by hand, whose row-parallel layers use the all-reduce of torch.distributed.nn.

Thread: NVIDIA/Megatron-LM issue #559 "[QUESTION] All-Reduce placement in backwards for Tensor Parallel MLP blocks" (2023) and
Dao-AILab/flash-attention issue #1244 "Why do we have an all_reduce with wrong backward?" (2024).
Fault: in RowParallel.forward, the all-reduce sums the gradient over the ranks in backward, but each rank has the whole
gradient of the output already, since all of them compute the same loss.
REPAIR: `nnf.all_reduce(y, group=self.group)` -> `y + (nnf.all_reduce(y.detach(), group=self.group) - y).detach()`
Expected: the loss and everything in the forward pass agree; the gradients of final_norm and head agree, and those within
the row-parallel layers' branches (down, up, proj, qkv) and below are wrong: the all-reduce after each row-parallel layer
(down of the last block first) sums the gradient over tp once more in backward, which makes it twice as large.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nnf
from torch import nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

import titanlite

VOCAB, WIDTH, HEADS = 13, 12, 4


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class RowParallel(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        rank, size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, x):
        y = x @ self.weight.t()
        return nnf.all_reduce(y, group=self.group)


class ColumnParallel(nn.Module):
    """`blocks` matrices one below the other, of each of which the rank has its rows."""

    def __init__(self, whole, group, blocks=1):
        super().__init__()
        rank, size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        rows = whole.weight.detach().unflatten(0, (blocks, size, -1))[:, rank]
        self.weight = nn.Parameter(rows.flatten(0, 1).clone())

    def forward(self, x):
        return Enter.apply(x, self.group) @ self.weight.t()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, WIDTH // HEADS)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(relu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.final_norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx):
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def loss(model, batch):
    return cross_entropy(model(batch["idx"]).flatten(0, 1), batch["target"].flatten())


def parallel(mesh):
    model, group = GPT(), mesh.get_group("tp")
    for block in model.blocks:
        block.qkv, block.up = ColumnParallel(block.qkv, group, 3), ColumnParallel(block.up, group)
        block.proj, block.down = RowParallel(block.proj, group), RowParallel(block.down, group)
    return model


def own_heads(whole):
    return whole.unflatten(0, (3, 2, -1))[:, dist.get_rank()].flatten(0, 1)


def shard(name):
    if "qkv" in name:
        return own_heads
    if ".up." in name:
        return 0, "tp"
    return (1, "tp") if "proj" in name or "down" in name else None


rng = torch.Generator().manual_seed(304)
batches = [
    dict(zip(("idx", "target"), torch.randint(VOCAB, (2, 3, 6), generator=rng))) for _ in range(3)
]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
