"""Distillation of a decoder, tensor parallel by parallelize_module, whose output head and teacher's logits are cut by words.

Thread: NVIDIA-NeMo/Automodel issue #3776 "kd loss under tensor parallelism trains with gradients scaled by tp_size" (2026): the
sum over the tp ranks uses the differentiable all_reduce, whose backward reduces the gradients again; the logged loss is right.
Fault: VocabParallelLosses.kd adds up the ranks' parts of the divergence with torch.distributed.nn.functional.all_reduce; every
rank starts its own backward pass from the same loss, so the gradients of the distillation term come out tp times too large.
REPAIR: `return funcol.all_reduce(part, group=self.group)` -> `return SumOverWords.apply(part, self.group)`
A right first sentence says: the all-reduce of the distillation loss reduces the gradient once more in its backward pass, so the
KD term's gradient is multiplied by the tensor parallel size while the cross-entropy's is right, and all gradients are off.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as funcol
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import titanlite

VOCAB, WIDTH, HEAD_DIM, HIDDEN, LENGTH, LAYERS = 24, 16, 4, 32, 10, 2
KD_RATIO, TEMPERATURE = 0.5, 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def attention(self, x):
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.w2(F.silu(self.w1(self.ffn_norm(x))))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embeddings(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def shard_student(model, mesh):
    for layer in model.layers:
        plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "w1")}
        parallelize_module(layer, mesh, plan | {"wo": RowwiseParallel(), "w2": RowwiseParallel()})
    plan = {"output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=True)}
    return parallelize_module(model, mesh, plan)


class VocabParallelLogSoftmax(torch.autograd.Function):
    """The log-probabilities of this rank's words."""

    @staticmethod
    def forward(ctx, logits, group):
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        total = (logits - largest).exp().sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        ctx.group, result = group, logits - largest - total.log()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        total = grad.sum(-1, keepdim=True)
        dist.all_reduce(total, group=ctx.group)
        return grad - result.exp() * total, None


class SumOverWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class VocabParallelLosses:
    def __init__(self, mesh):
        self.group = mesh.get_group()
        self.words = torch.arange(VOCAB).chunk(mesh.size())[mesh.get_local_rank()]

    def ce(self, logits, labels):
        logprobs = VocabParallelLogSoftmax.apply(logits, self.group)
        hits = labels.unsqueeze(-1) == self.words
        return -SumOverWords.apply((logprobs * hits).sum(-1), self.group).mean()

    def kd(self, logits, teacher_logits):
        student = VocabParallelLogSoftmax.apply(logits / TEMPERATURE, self.group)
        mine = teacher_logits[..., self.words] / TEMPERATURE
        teacher = VocabParallelLogSoftmax.apply(mine, self.group)
        part = (teacher.exp() * (teacher - student)).sum(-1).mean() * TEMPERATURE**2
        return funcol.all_reduce(part, group=self.group)


def plain():
    return Student()


def parallel(mesh):
    return shard_student(Student(), mesh["tp"]), VocabParallelLosses(mesh["tp"])


def loss(model, batch):
    tokens, labels, teacher_logits = batch
    logits = model(tokens)
    student, teacher = (F.log_softmax(x / TEMPERATURE, -1) for x in (logits, teacher_logits))
    kd = (teacher.exp() * (teacher - student)).sum(-1).mean() * TEMPERATURE**2
    return (1 - KD_RATIO) * F.cross_entropy(logits.mT, labels) + KD_RATIO * kd


def step(built, batch):
    model, losses = built
    tokens, labels, teacher_logits = batch
    logits = model(tokens)
    value = (1 - KD_RATIO) * losses.ce(logits, labels)
    value = value + KD_RATIO * losses.kd(logits, teacher_logits)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(3776)


def distillation_batch(rows=4):
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    logits = torch.randn(rows, LENGTH, VOCAB, generator=generator, dtype=torch.float64)
    logits = 2 * logits + 3 * F.one_hot(text[:, 1:], VOCAB)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous(), logits


batches = [distillation_batch() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
