"""A decoder whose attention is data-parallel and whose MLPs are tensor-parallel, on the same three ranks.

Thread: sgl-project/sglang pull request #8278 "[3/n] DP Enhancement: Padding tokens to max length when workload is
balanced" (2025), which describes both ways; here it is "Padding tokens to sum(len) and use all-reduce to gather
tensors".
What could be accused: an all-reduce does the work of a gather, and another that of a scatter; the ranks have four, one
and three rows; and after the backward pass the gradients of some parameters are summed over the ranks while those of
the MLPs are not; but each place of the buffer is written by one rank, the MLPs' shards have already seen the tokens of
all ranks, and everything else has seen its rank's own tokens alone, whose losses are divided by the number of all.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HIDDEN, HEADS, LAYERS, LENGTH, SHARES = 17, 12, 24, 3, 2, 6, (4, 1, 3)


class DpBuffer:
    def __init__(self, group):
        self.group, self.rank = group, dist.get_rank(group)

    def prepare(self, tokens):
        counts = torch.zeros(dist.get_world_size(self.group), dtype=torch.long)
        counts[self.rank] = tokens
        dist.all_reduce(counts, group=self.group)
        self.total = int(counts.sum())
        end = int(counts[: self.rank + 1].sum())
        self.own = slice(end - tokens, end)

    def gather(self, x):
        buffer = x.new_zeros(self.total, x.shape[-1])
        buffer[self.own] = x
        dist.all_reduce(buffer, group=self.group)
        return buffer

    def scatter(self, x):
        dist.all_reduce(x := x.clone(), group=self.group)
        return x[self.own].clone()


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


class Mlp(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class TpMlp(Mlp):
    def __init__(self, whole, buffer):
        size = dist.get_world_size(buffer.group)
        super().__init__(HIDDEN // size)
        self.buffer = buffer
        self.up.weight.data.copy_(whole.up.weight.data.chunk(size, 0)[buffer.rank])
        self.down.weight.data.copy_(whole.down.weight.data.chunk(size, 1)[buffer.rank])

    def forward(self, x):
        gather, scatter = self.buffer.gather, self.buffer.scatter
        everyones = super().forward(Exchange.apply(x.flatten(0, -2), gather, scatter))
        return Exchange.apply(everyones, scatter, gather).view_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp()

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        y = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(name):
    if name.endswith("up.weight"):
        return 0, "tp"
    return (1, "tp") if name.endswith("down.weight") else None


def plain():
    return Decoder()


def parallel(mesh):
    model, buffer = Decoder(), DpBuffer(mesh.get_group("tp"))
    for layer in model.layers:
        layer.mlp = TpMlp(layer.mlp, buffer)
    return model, buffer


def split(tokens, mesh):
    return tokens.split(SHARES)[mesh.get_local_rank("tp")]


def loss(model, tokens, reduction="mean"):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


def step(built, tokens):
    model, buffer = built
    buffer.prepare(tokens[:, 1:].numel())
    value = loss(model, tokens, "sum") / buffer.total
    value.backward()
    for name, parameter in model.named_parameters():
        if ".mlp." not in name:
            dist.all_reduce(parameter.grad, group=buffer.group)
    return value.detach()


generator, size = torch.Generator().manual_seed(8278), (sum(SHARES), LENGTH + 1)
batches = [torch.randint(0, WORDS, size, generator=generator) for _ in range(3)]
arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split=split, ranks={"tp": 3}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
