"""A vocab-parallel cross entropy: the loss is computed from shards of the logits.

Thread: https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/394 "Question about the
implementation of mpu.cross_entropy when using tensor parallel", 2023-08-03.
Right: maximum, sum of exponentials and the target's logit are all-reduced, so every rank of tp has
the same loss. Backward needs no communication.
Must not be accused: the head, whose output is a shard of the vocabulary; the loss without logits.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 24, 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(x))


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ParallelHead(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        n, self.group = dist.get_world_size(group), group
        self.weight = nn.Parameter(whole.weight.detach().chunk(n)[dist.get_rank(group)].clone())

    def forward(self, x):
        return CopyToTP.apply(x, self.group) @ self.weight.t()


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        size = logits.shape[-1]
        first = dist.get_rank(group) * size
        peak = logits.max(-1).values
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        logits = logits - peak.unsqueeze(-1)
        outside = (target < first) | (target >= first + size)
        local = (target - first).masked_fill(outside, 0)
        picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        dist.all_reduce(picked, group=group)
        probs = logits.exp()
        total = probs.sum(-1)
        dist.all_reduce(total, group=group)
        loss = total.log() - picked
        probs = probs / total.unsqueeze(-1)
        ctx.save_for_backward(probs, outside, local)
        return loss

    @staticmethod
    def backward(ctx, grad):
        probs, outside, local = ctx.saved_tensors
        one_hot = torch.zeros_like(probs)
        one_hot.scatter_(-1, local.unsqueeze(-1), (~outside).to(probs.dtype).unsqueeze(-1))
        return (probs - one_hot) * grad.unsqueeze(-1), None, None


def plain_loss(model, batch):
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def parallel(mesh):
    model = Model()
    model.head = ParallelHead(model.head, mesh.get_group("tp"))
    return model


def step(model, batch):
    logits = model(batch["tokens"])
    losses = VocabParallelCrossEntropy.apply(logits, batch["y"], model.head.group)
    loss = losses.mean()
    loss.backward()
    return loss


generator = torch.Generator().manual_seed(1)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("tokens", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"tp": 2}, step=step)
    print(titanlite.compare(Model, parallel, **options))
