"""FSDP2 with a fused projection and cross entropy, whose losses per token are weighted afterwards.

Thread: linkedin/Liger-Kernel issue #968 "[BUG]LigerFusedLinearCrossEntropyLoss(reduction='none') results in wrong grad, even
causes grad=0" (2025): multiplied by a weight mask, the loss is right and its gradient is not.
Fault: in FusedLinearCrossEntropy.backward, the gradient of the first token's loss stands for those of all tokens.
REPAIR: `grad_output[0]` -> `grad_output[:, None]`
Expected: the losses per token and the loss agree; the gradient of the head's weight and of the hidden states that enter the
head, and so of all weights below, is wrong on every rank: the backward pass of the fused loss takes the first token's
gradient (its weight) for all tokens.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import titanlite

VOCAB, DIM = 15, 10


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Losses per token of linear(x, weight); in forward, the logits become their own gradient."""

    @staticmethod
    def forward(ctx, x, weight, target):
        logits = x @ weight.t()
        rows = torch.arange(len(target))
        lse = logits.logsumexp(1)
        losses = lse - logits[rows, target]
        logits.sub_(lse[:, None]).exp_()
        logits[rows, target] -= 1
        ctx.save_for_backward(x, weight, logits)
        return losses

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, grad_logits = ctx.saved_tensors
        grad_logits = grad_logits * grad_output[0]
        return grad_logits @ weight, grad_logits.t() @ x, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.w1 = nn.Linear(DIM, 3 * DIM, bias=False)
        self.w2 = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.w2(F.gelu(self.w1(self.norm(x + past))))


class LanguageModel(nn.Module):
    fused = False

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, targets):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        x, targets = self.norm(x).flatten(0, 1), targets.flatten()
        if self.fused:
            return FusedLinearCrossEntropy.apply(x, self.head.weight, targets)
        return F.cross_entropy(self.head(x), targets, reduction="none")


def loss(model, batch):
    """Answers count more than prompts."""
    return (model(batch["tokens"], batch["targets"]) * batch["weights"].flatten()).mean()


def parallel(mesh):
    model = LanguageModel()
    model.fused = True
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


rng = torch.Generator().manual_seed(302)


def draw():
    tokens = torch.randint(VOCAB, (6, 6), generator=rng)
    weights = 0.2 + torch.rand(6, 5, generator=rng)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


batches = [draw() for _ in range(3)]
arguments = LanguageModel, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
