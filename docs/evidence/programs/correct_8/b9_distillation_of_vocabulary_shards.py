"""Distillation with student logits cut over the vocabulary: forward and reverse KL from the shards, without a gather.

Thread: of the kind NVIDIA/NeMo-Aligner pull request #348 "knowledge distillation support for SFT" (2024) and ServiceNow/Fast-LLM
pull request #400 "TP support for reverse KL loss" (2025).
Correct: each rank takes its columns of the teacher's logits. Maxima and normalizers are those of all ranks, for both models.
The student's normalizer enters the reverse KL of every rank, so its gradient is summed over the ranks in backward; the final
sums over the vocabulary are the same on all ranks, and their gradient is not.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

import titanlite

VOCAB, DIM, TEMPERATURE = 16, 8, 2.0


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.group, self.up, self.down = None, nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        if self.group is None:
            return self.down(torch.relu(self.up(x)))
        y = torch.relu(self.up(Copy.apply(x, self.group)))
        return Reduce.apply(linear(y, self.down.weight), self.group) + self.down.bias


class Student(nn.Module):
    """Gives its logits, or with a group the own columns of them."""

    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks):
            past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
            x = x + block(norm(x + past))
        return self.head(x if self.group is None else Copy.apply(x, self.group))


def loss(model, batch):
    student = (model(batch["tokens"]) / TEMPERATURE).log_softmax(-1)
    teacher = (batch["teacher"] / TEMPERATURE).log_softmax(-1)
    forward_kl = (teacher.exp() * (teacher - student)).sum(-1)
    reverse_kl = (student.exp() * (student - teacher)).sum(-1)
    return TEMPERATURE**2 * (0.7 * forward_kl + 0.3 * reverse_kl).mean()


def parallel_log_softmax(logits, group):
    top = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits = logits - top
    total = Reduce.apply(logits.exp().sum(-1, keepdim=True), group)
    return logits - Copy.apply(total.log(), group)


def parallel_loss(model, batch):
    group, n, rank = model.group, dist.get_world_size(model.group), dist.get_rank(model.group)
    student = parallel_log_softmax(model(batch["tokens"]) / TEMPERATURE, group)
    teacher = parallel_log_softmax(batch["teacher"].chunk(n, -1)[rank] / TEMPERATURE, group)
    forward_kl = (teacher.exp() * (teacher - student)).sum(-1)
    reverse_kl = (student.exp() * (student - teacher)).sum(-1)
    return TEMPERATURE**2 * Reduce.apply((0.7 * forward_kl + 0.3 * reverse_kl).mean(), group)


def shard(name):
    if name.endswith("down.weight"):
        return 1, "tp"
    return (0, "tp") if name.startswith("head.") or ".up." in name else None


def parallel(mesh):
    model, n, rank = Student(), mesh["tp"].size(), mesh.get_local_rank("tp")
    for module in (model, *model.blocks):
        module.group = mesh.get_group("tp")
    for name, p in model.named_parameters():
        cut = shard(name)
        if cut is not None:
            p.data = p.data.chunk(n, cut[0])[rank].clone()
    return model


generator = torch.Generator().manual_seed(139)


def draw():
    tokens = torch.randint(VOCAB, (4, 6), generator=generator)
    return {"tokens": tokens, "teacher": 2 * torch.randn(4, 6, VOCAB, generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Student, parallel
options = dict(
    batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"tp": 2}, shard=shard
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
