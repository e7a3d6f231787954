"""GPT-NeoX with output_layer_parallelism = "row": whole logits enter the vocabulary-parallel loss.

Thread: https://github.com/EleutherAI/gpt-neox/issues/905 "Default of `output_layer_parallelism = "row"`
is broken for model-parallel training", 2023-04-25.
Wrong: a row-parallel output layer reduces its output, so every rank has the logits of the whole
vocabulary. vocab_parallel_cross_entropy takes them for the rank's part: it sums the exponentials of both
ranks, and rank 1 finds no target in its range.
A right diagnosis says: the logits agree, but the loss is too large by log(2), the logarithm of tp: the
loss function sums over tp what is already whole (parallel_loss).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

DIM, VOCAB = 16, 24


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        largest = logits.max(-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        size = logits.shape[-1]
        start = dist.get_rank(group) * size
        outside = (target < start) | (target >= start + size)
        masked_target = (target - start).masked_fill(outside, 0)
        predicted = logits.gather(-1, masked_target.unsqueeze(-1)).squeeze(-1)
        predicted = predicted.masked_fill(outside, 0.0)
        dist.all_reduce(predicted, group=group)
        exp_logits = logits.exp()
        sum_exp = exp_logits.sum(-1)
        dist.all_reduce(sum_exp, group=group)
        ctx.save_for_backward(exp_logits / sum_exp.unsqueeze(-1), outside, masked_target)
        return sum_exp.log() - predicted

    @staticmethod
    def backward(ctx, grad_output):
        softmax, outside, masked_target = ctx.saved_tensors
        ones = (~outside).to(softmax.dtype).unsqueeze(-1)
        grad = softmax.scatter_add(-1, masked_target.unsqueeze(-1), -ones)
        return grad * grad_output.unsqueeze(-1), None, None


class RowParallel(torch.autograd.Function):
    """input is split over the last dimension, the partial output is reduced"""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.group = group
        x = x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()
        ctx.save_for_backward(x, weight)
        out = x @ weight.t()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        own = grad @ weight
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, own, group=ctx.group)
        return torch.cat(parts, -1), grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class ParallelLinearPipe(nn.Module):
    def __init__(self, world=1, group=None):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM // world) * 0.2)

    def forward(self, x):
        if self.group is None:
            return x @ self.weight.t()
        return RowParallel.apply(x, self.weight, self.group)


class GPTNeoX(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 32), nn.Linear(32, DIM)
        self.final_linear = ParallelLinearPipe()

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(gelu(self.up(self.norm(x))))
        return self.final_linear(x)


def loss(model, batch):
    return cross_entropy(model(batch["text"]).flatten(0, 1), batch["labels"].flatten())


def parallel_loss(model, batch):
    group = model.final_linear.group
    return VocabParallelCrossEntropy.apply(model(batch["text"]), batch["labels"], group).mean()


def parallel(mesh):
    model, world = GPTNeoX(), mesh["mp"].size()
    part = model.final_linear.weight.data.chunk(world, 1)[mesh.get_local_rank("mp")]
    model.final_linear = ParallelLinearPipe(world, mesh.get_group("mp"))
    model.final_linear.weight.data = part.clone()
    return model


generator = torch.Generator().manual_seed(22)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("text", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"mp": 2})
    print(titanlite.compare(GPTNeoX, parallel, **options))
