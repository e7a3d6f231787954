"""A row-parallel layer that adds a part of its bias on every rank, before the all-reduce.

Thread: https://github.com/huggingface/text-generation-inference/issues/1036 "When using models whose have bias,
bias of `TensorParallelRowLinear` is multi-added by tp-degree", 2023-09-18.
Right: each rank adds bias / tp, so the sum has the bias once. Its gradient is divided by tp with it; a hook
multiplies it again, so that every rank has the whole gradient of its copy.
Must not be accused: a bias inside a partial sum, a hook that scales one gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

DIM, HIDDEN, VOCAB = 16, 32, 20


class Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.args = group, in_forward
        x = x.clone()
        if in_forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        group, in_forward = ctx.args
        grad = grad.clone()
        if not in_forward:
            dist.all_reduce(grad, group=group)
        return grad, None, None


class RowLinear(nn.Linear):
    group = None

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        partial = linear(x, self.weight, self.bias / self.group.size())
        return Region.apply(partial, self.group, True)


class BloomMlp(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(DIM, HIDDEN), RowLinear(HIDDEN, DIM)

    def forward(self, x):
        x = x if self.group is None else Region.apply(x, self.group, False)
        return self.dense_4h_to_h(gelu(self.dense_h_to_4h(x)))

    def cut(self, group):
        self.group = self.dense_4h_to_h.group = group
        n, i = group.size(), group.rank()
        up, down = self.dense_h_to_4h, self.dense_4h_to_h
        up.weight.data, up.bias.data = up.weight.data.chunk(n)[i], up.bias.data.chunk(n)[i]
        down.weight.data = down.weight.data.chunk(n, 1)[i].clone()
        down.bias.register_hook(lambda grad: grad * n)


class Bloom(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings, self.ln = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.h = nn.ModuleList(BloomMlp() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.word_embeddings(ids)
        for mlp in self.h:
            x = x + mlp(self.ln(x))
        return self.lm_head(x)


def pretrained():
    model = Bloom()
    for mlp in model.h:
        nn.init.normal_(mlp.dense_4h_to_h.bias)
    return model


def parallel(mesh):
    model = pretrained()
    for mlp in model.h:
        mlp.cut(mesh.get_group("tp"))
    return model


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(1036)
batches = [
    {name: torch.randint(VOCAB, (3, 5), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(pretrained, parallel, batches=batches, loss=loss, ranks={"tp": 2}))
