"""Sequence parallelism whose activations are flattened tokens, [B * S / n, E] on each rank.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/722 "[BUG] Sequence Parallel is not All-gathered
when using Flash Attention?" ("Never mind ..."), 2024-03-07.
Right: tokens are flattened (batch first) and cut into chunks over tp; attention and MLP gather all
tokens before the column-parallel product and reduce-scatter after the row-parallel one. The norms'
gradients are all-reduced by hooks.
Must not be accused: outputs of shape [B * S / n, E], attention over a part of the tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS = 20, 16, 4


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.args, n = (group, sums), dist.get_world_size(group)
        out = x.new_empty(n * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        group, sums = ctx.args
        n = dist.get_world_size(group)
        if not sums:
            return grad.chunk(n)[dist.get_rank(group)], None, None
        out = grad.new_empty(len(grad) // n, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=group)
        return out, None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Gather.apply(grad, ctx.group, True), None


class Block(nn.Module):
    def __init__(self, n=1, group=None):
        super().__init__()
        self.heads, self.group = HEADS // n, group
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM // n, bias=False) for _ in range(3))
        self.wo = nn.Linear(DIM // n, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 32 // n), nn.Linear(32 // n, DIM, bias=False)

    def gather(self, x):
        return Gather.apply(x, self.group, True) if self.group else x

    def scatter(self, x):
        return ReduceScatter.apply(x, self.group) if self.group else x

    def forward(self, x, shape):
        h = self.gather(self.norm1(x))
        q, k, v = (w(h).unflatten(0, shape) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        h = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.scatter(self.wo(h.transpose(1, 2).flatten(2).flatten(0, 1)))
        return x + self.scatter(self.down(gelu(self.up(self.gather(self.norm2(x))))))


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        rows = tokens.flatten()
        if self.group is not None:
            rows = rows.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x, tokens.shape)
        x = self.norm(x)
        x = Gather.apply(x, self.group, False) if self.group is not None else x
        return self.head(x)


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    n, i, model.group = mesh["tp"].size(), mesh.get_local_rank("tp"), group
    rows, columns = ("wo.weight", "down.weight"), ("wq", "wk", "wv", "up")
    for index, whole in enumerate(model.blocks):
        block = Block(n, group)
        for name, p in whole.named_parameters():
            dim = 1 if name in rows else 0 if name.startswith(columns) else None
            part = p.data if dim is None else p.data.chunk(n, dim)[i]
            block.get_parameter(name).data = part.clone()
        model.blocks[index] = block

    def total(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    partial = [model.embed.weight, *model.norm.parameters()]
    for block in model.blocks:
        partial += [*block.norm1.parameters(), *block.norm2.parameters()]
    for p in partial:
        p.register_hook(total)
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"].flatten())


generator = torch.Generator().manual_seed(13)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}))
