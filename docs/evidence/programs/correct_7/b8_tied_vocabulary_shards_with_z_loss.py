"""Tied embedding and head, both vocabulary-parallel with one shard as weight, and cross-entropy with a z-loss.

Thread: of the kind "weight tying with VocabParallelEmbedding and parallel_output" and "z-loss with vocab-parallel cross
entropy" (Megatron-LM, GPT-NeoX, OLMo), 2022 to 2025.
Correct: the embedding's and the head's gradient of a shard are both whole on its rank. Masked rows are zeroed with
autograd. The logsumexp of cross-entropy and z-loss is that of all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding

import titanlite

VOCAB, DIM, WEIGHT = 16, 8, 0.1


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mixer = nn.GRU(DIM, DIM, batch_first=True)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens):
        return self.norm(self.mixer(self.embed(tokens))[0]) @ self.embed.weight.T


class VocabParallelEmbedding(nn.Module):
    def __init__(self, whole):
        super().__init__()
        n, i = dist.get_world_size(), dist.get_rank()
        self.weight = nn.Parameter(whole.weight.detach().chunk(n, 0)[i].clone())
        self.start = i * len(self.weight)

    def forward(self, tokens):
        local = tokens - self.start
        inside = (local >= 0) & (local < len(self.weight))
        x = embedding(local.masked_fill(~inside, 0), self.weight)
        return Sum.apply(x * inside[..., None])


class ParallelModel(Model):
    def forward(self, tokens):
        x = self.norm(self.mixer(self.embed(tokens))[0])
        return Copy.apply(x) @ self.embed.weight.T


def loss(model, batch):
    logits, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    return cross_entropy(logits, targets) + WEIGHT * logits.logsumexp(-1).square().mean()


def parallel_loss(model, batch):
    logits, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    width = logits.shape[-1]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    log_z = Sum.apply((logits - largest[:, None]).exp().sum(-1)).log() + largest
    local = targets - dist.get_rank() * width
    mine = (local >= 0) & (local < width)
    picked = logits.gather(-1, local.clamp(0, width - 1)[:, None])[:, 0] * mine
    return (log_z - Sum.apply(picked)).mean() + WEIGHT * log_z.square().mean()


def parallel(mesh):
    model = ParallelModel()
    model.embed = VocabParallelEmbedding(model.embed)
    return model


def shard(name):
    return (0, "tp") if name == "embed.weight" else None


generator = torch.Generator().manual_seed(34)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(
    batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"tp": 2}, shard=shard
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
