"""Megatron's sequence parallelism, whose norm and bias gradients are all-reduced by the optimizer.

Thread: https://github.com/NVIDIA/Megatron-LM/pull/236 "[Fix] operational error in RowParallelLinear
when using sequence parallel" (closed: the optimizer reduces them), 2022-07-16; also
https://github.com/NVIDIA/Megatron-LM/issues/443 (2023-08-02).
Right: after backward, the gradients of the norms and of the row-parallel biases are partial sums over
tp; optimizer.step() all-reduces them first.
Must not be accused: any weight, update or replica. (A remark that gradients are Partial until the
optimizer reduces them is right; a demand for another all-reduce is not.)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

DIM = 16


class GatherForColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        n = dist.get_world_size(ctx.group)
        out = grad.new_empty(grad.shape[0] // n, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class ReduceScatterFromRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(grad.shape[0] * dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.all_gather_into_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class Layer(nn.Module):
    def __init__(self, group=None, n=1):
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 32 // n), nn.Linear(32 // n, DIM, bias=False)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x):  # [S, B, E], or the rank's part of S
        h = self.norm(x)
        h = GatherForColumn.apply(h, self.group) if self.group else h
        h = self.down(gelu(self.up(h)))
        h = ReduceScatterFromRow.apply(h, self.group) if self.group else h
        return x + h + self.bias


class GPT(nn.Module):
    group = None

    def __init__(self, vocab=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab)

    def forward(self, tokens):  # [S, B]
        x = self.embed(tokens)
        if self.group is not None:
            x = x.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.group is not None:
            x = GatherForColumn.apply(x, self.group)
        return self.head(x)


class ReducingAdamW(torch.optim.AdamW):
    """All-reduces the gradients of sequence-parallel parameters before its step."""

    group, params = None, ()

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.params:
            dist.all_reduce(p.grad, group=self.group)
        return super().step(closure)


def parallel(mesh):
    group, n, i = mesh.get_group("tp"), mesh["tp"].size(), mesh.get_local_rank("tp")
    model = GPT()
    model.group = group
    for index, whole in enumerate(model.layers):
        layer = Layer(group, n)
        layer.norm.load_state_dict(whole.norm.state_dict())
        for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
            part = whole.get_parameter(name).data.chunk(n, dim)[i].clone()
            layer.get_parameter(name).data = part
        model.layers[index] = layer
    optimizer = ReducingAdamW(model.parameters(), lr=1e-3)
    optimizer.group = group
    optimizer.params = [model.embed.weight, *model.norm.parameters()]
    for layer in model.layers:
        optimizer.params += [*layer.norm.parameters(), layer.bias]
    return model, optimizer


def plain_loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(built, batch):
    loss = plain_loss(built[0], batch)
    # every rank computes the same loss; the gather's backward sums over the ranks
    (loss / dist.get_world_size(built[0].group)).backward()
    for p in built[0].head.parameters():
        p.grad *= dist.get_world_size(built[0].group)
    return loss


generator = torch.Generator().manual_seed(11)
batches = [
    {name: torch.randint(20, (6, 3), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"tp": 2}, step=step)
    print(titanlite.compare(GPT, parallel, **options))
