"""Cross entropy over vocabulary shards, used with labels of -100.

Thread: https://github.com/EleutherAI/oslo/pull/85 "Feature/84 apply vocab parallel cross entropy" ("enable
`ignore_index` for vocab parallel loss"), 2022-10-24.
Wrong: a label of -100 lies outside of every rank's shard, so its predicted logit is 0 and its loss is the
logarithm of the sum of exponentials, instead of nothing. The divisor counts only the valid labels.
EXPECT: the logits agree and the loss is the first that differs: the losses of the ignored labels (-100) are not
masked, they contribute log(sum(exp)).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 14, 10


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        size = logits.shape[-1]
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[:, None]
        target = target - group.rank() * size
        mask = (target < 0) | (target >= size)
        target = target.masked_fill(mask, 0)
        predicted = logits.gather(-1, target[:, None])[:, 0].masked_fill(mask, 0.0)
        dist.all_reduce(predicted, group=group)
        exp = logits.exp()
        total = exp.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exp / total[:, None], mask, target)
        return total.log() - predicted

    @staticmethod
    def backward(ctx, grad):
        softmax, mask, target = ctx.saved_tensors
        softmax = softmax.clone()
        softmax[torch.arange(len(target)), target] -= (~mask).to(softmax.dtype)
        return softmax * grad[:, None], None, None


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class LanguageModel(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.mlp, self.lm_head = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + torch.tanh(self.mlp(x)))
        return self.lm_head(x if self.group is None else Copy.apply(x, self.group))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel_loss(model, batch):
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    losses = VocabParallelCrossEntropy.apply(logits, labels, model.group)
    return losses.sum() / (labels != -100).sum()


def parallel(mesh):
    model, group = LanguageModel(), mesh.get_group("tp")
    model.group = group
    rows = model.lm_head.weight.data.chunk(group.size())[group.rank()].clone()
    model.lm_head.weight = nn.Parameter(rows)
    return model


def draw(generator):
    batch = {n: torch.randint(VOCAB, (2, 6), generator=generator) for n in ("tokens", "labels")}
    batch["labels"][torch.rand(2, 6, generator=generator) < 0.3] = -100
    return batch


generator = torch.Generator().manual_seed(85)
batches = [draw(generator) for _ in range(3)]
arguments = LanguageModel, parallel
options = dict(batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
