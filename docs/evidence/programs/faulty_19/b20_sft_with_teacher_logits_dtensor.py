"""Instruction tuning with stored teacher logits; the student is cut by parallelize_module and its logits stay vocabulary shards.

Thread: NVIDIA-NeMo/Automodel issue #3776 "kd loss under tensor parallelism trains with gradients scaled by tp_size" (2026): the
KL sum over the tp ranks goes through torch.distributed.nn.functional.all_reduce, whose backward reduces the gradients once more.
Fault: sharded_kl adds up the ranks' parts of the divergence with that differentiable all_reduce; the total is used alike on all
tp ranks, so its backward multiplies the distillation gradient by the number of tp ranks. The value of the loss is right.
REPAIR: `kl = functional.all_reduce(kl, group=group)` -> `kl = SumOfShards.apply(kl, group)`
A right first sentence says: the KL term is summed over the tp ranks by an all-reduce that also all-reduces its gradient, which
every rank already has in full, so the distillation part of all gradients is tp times too large though the loss is right.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import titanlite

VOCAB, WIDTH, HEAD_DIM, HIDDEN, LENGTH, IGNORE = 24, 16, 4, 40, 9, -100
KD_RATIO, TEMPERATURE = 0.5, 1.5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        qkv = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class SumOfShards(torch.autograd.Function):
    """For sums that all ranks use alike."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(total := x.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def shifted_by_maximum(logits, group):
    maximum = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    return logits - maximum


def sharded_cross_entropy(logits, labels, group):
    """The negative log likelihood of each token, zero where the label is ignored."""
    logits, size = shifted_by_maximum(logits, group), logits.size(-1)
    mine = torch.arange(size) + dist.get_rank(group) * size
    target = SumOfShards.apply((logits * (labels.unsqueeze(-1) == mine)).sum(-1), group)
    total = SumOfShards.apply(logits.exp().sum(-1), group)
    return (total.log() - target) * (labels != IGNORE)


def sharded_log_softmax(logits, group):
    """Own columns only; the gradient of the normalizer comes from the columns of all ranks."""
    logits = shifted_by_maximum(logits, group)
    return logits - functional.all_reduce(logits.exp().sum(-1, keepdim=True), group=group).log()


def sharded_kl(logits, teacher, labels, group):
    student, teacher = (sharded_log_softmax(x / TEMPERATURE, group) for x in (logits, teacher))
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    kl = functional.all_reduce(kl, group=group)
    return kl * (labels != IGNORE) * TEMPERATURE**2


def parallelize(model, mesh):
    columns = "attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"
    plan = {f"layers.*.{name}": ColwiseParallel() for name in columns}
    plan["layers.*.attention.o"] = plan["layers.*.feed_forward.down"] = RowwiseParallel()
    return parallelize_module(model, mesh, {**plan, "output": ColwiseParallel()})


def plain():
    return Student()


def parallel(mesh):
    return parallelize(Student(), mesh["tp"]), mesh.get_group("tp")


def loss(model, batch):
    tokens, labels, teacher = batch
    logits = model(tokens)
    ce = F.cross_entropy(logits.mT, labels, ignore_index=IGNORE)
    student, teacher = ((x / TEMPERATURE).log_softmax(-1) for x in (logits, teacher))
    kl = (teacher.exp() * (teacher - student)).sum(-1)[labels != IGNORE].mean() * TEMPERATURE**2
    return (1 - KD_RATIO) * ce + KD_RATIO * kl


def step(built, batch):
    (model, group), (tokens, labels, teacher) = built, batch
    logits, count = model(tokens), (labels != IGNORE).sum()
    teacher = teacher.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)]
    ce = sharded_cross_entropy(logits, labels, group).sum() / count
    kl = sharded_kl(logits, teacher, labels, group).sum() / count
    value = (1 - KD_RATIO) * ce + KD_RATIO * kl
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(3776)


def examples(rows=4):
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    prompts = torch.randint(1, 5, (rows, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompts, IGNORE)
    logits = torch.randn(rows, LENGTH, VOCAB, generator=generator, dtype=torch.float64)
    return text[:, :-1].contiguous(), labels, 2 * logits


batches = [examples() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
