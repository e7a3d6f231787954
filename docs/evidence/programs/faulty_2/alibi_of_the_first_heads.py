"""BLOOM's attention with ALiBi under tensor parallelism: every rank takes the bias of the first heads.

Thread: https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/227 "Likely bug in Alibi
positional embeddings together with Tensor Parallelism.", 2022-01-07.
Wrong: alibi has one slice per head of the whole model; each rank of tp holds two of the four heads, but
reads alibi[:2]. This is right on rank 0 only.
A right diagnosis says: the error is inside attention, between the output of query_key_value and the
input of dense, on rank 1 of tp only (its heads 2 and 3 get another bias than on one process).
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

DIM, HEADS, HEAD_DIM, VOCAB = 16, 4, 4, 20


class CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, group):
        ctx.group = group
        return input_

    @staticmethod
    def backward(ctx, grad_output):
        grad_output = grad_output.contiguous().clone()
        dist.all_reduce(grad_output, group=ctx.group)
        return grad_output, None


class ReduceFromModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, group):
        input_ = input_.clone()
        dist.all_reduce(input_, group=group)
        return input_

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class ParallelAttention(nn.Module):
    def __init__(self, world=1, group=None):
        super().__init__()
        self.group, self.num_heads = group, HEADS // world
        # rows are ordered [head, (q, k, v), head_dim], so that a chunk holds whole heads
        self.query_key_value = nn.Linear(DIM, 3 * DIM // world)
        self.dense = nn.Linear(DIM // world, DIM, bias=False)

    def forward(self, x, alibi):
        if self.group is not None:
            x = CopyToModelParallelRegion.apply(x, self.group)
        mixed = self.query_key_value(x).unflatten(-1, (self.num_heads, 3 * HEAD_DIM))
        q, k, v = (t.transpose(1, 2) for t in mixed.chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM) + alibi[: self.num_heads]
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        probs = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        out = self.dense((probs @ v).transpose(1, 2).flatten(2))
        return out if self.group is None else ReduceFromModelParallelRegion.apply(out, self.group)


def build_alibi_tensor(seq):
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)])
    return slopes[:, None, None] * torch.arange(seq)[None, None, :]


class Bloom(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, DIM)
        self.ln = nn.LayerNorm(DIM)
        self.attention = ParallelAttention()
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.word_embeddings(ids)
        return self.lm_head(x + self.attention(self.ln(x), build_alibi_tensor(ids.shape[1])))


def parallel(mesh):
    model, world, rank = Bloom(), mesh["tp"].size(), mesh.get_local_rank("tp")
    whole, model.attention = model.attention, ParallelAttention(world, mesh.get_group("tp"))
    for name, param in model.attention.named_parameters():
        dim = 1 if name == "dense.weight" else 0
        param.data = whole.get_parameter(name).data.chunk(world, dim)[rank].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(21)
batches = [
    {name: torch.randint(VOCAB, (3, 7), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Bloom, parallel, batches=batches, loss=loss, ranks={"tp": 2}))
