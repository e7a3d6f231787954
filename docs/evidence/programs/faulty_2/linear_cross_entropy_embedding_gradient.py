"""Cut cross entropy with a vocabulary-parallel classifier: one function for projection and loss.

Thread: https://github.com/apple/ml-cross-entropy/pull/42 "Fix vocab parallel loss computation",
2025-05-28 ("most TP libraries/API will expect that the embedding gradient is returned the same across
all TP ranks").
Wrong: the backward pass returns de, which each rank of tp computes from its own slice of the classifier,
without an all-reduce.
A right diagnosis says: loss and classifier's gradient agree; the gradient of the final hidden states
(the output of norm) is still Partial over tp: the loss's own backward pass must sum it over tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, VOCAB = 16, 24


class VocabParallelLinearCrossEntropy(torch.autograd.Function):
    """mean of logsumexp(c @ e) - c[target] @ e, where c is sharded over the vocabulary"""

    @staticmethod
    def forward(ctx, e, c, targets, group):
        start = dist.get_rank(group) * c.shape[0]
        logits = e @ c.t()
        highest = logits.detach().max(-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        lse = (logits - highest[:, None]).exp().sum(-1)
        dist.all_reduce(lse, group=group)
        lse = lse.log() + highest
        local = (targets >= start) & (targets < start + c.shape[0])
        index = (targets - start).clamp(0, c.shape[0] - 1)
        neg_dot = -logits.gather(-1, index[:, None]).squeeze(-1) * local
        dist.all_reduce(neg_dot, group=group)
        ctx.save_for_backward(e, c, lse, index, local)
        return (lse + neg_dot).mean()

    @staticmethod
    def backward(ctx, grad_out):
        e, c, lse, index, local = ctx.saved_tensors
        d_logits = (e @ c.t() - lse[:, None]).exp()
        d_logits.scatter_add_(-1, index[:, None], -local[:, None].to(d_logits.dtype))
        d_logits *= grad_out / len(e)
        de = d_logits @ c
        dc = d_logits.t() @ e
        return de, dc, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.w1, self.w2 = nn.Linear(DIM, 40, bias=False), nn.Linear(40, DIM, bias=False)

    def forward(self, x):
        return x + self.w2(silu(self.w1(self.norm(x))))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(DIM)
        self.classifier = nn.Parameter(torch.randn(VOCAB, DIM) * 0.3)
        self.vocab_parallel_group = None

    def forward(self, tokens):
        return self.norm(self.blocks(self.embed(tokens)))


def loss(model, batch):
    hidden = model(batch["input_ids"]).flatten(0, 1)
    return cross_entropy(hidden @ model.classifier.t(), batch["labels"].flatten())


def linear_cross_entropy(model, batch):
    hidden = model(batch["input_ids"]).flatten(0, 1)
    return VocabParallelLinearCrossEntropy.apply(
        hidden, model.classifier, batch["labels"].flatten(), model.vocab_parallel_group
    )


def parallel(mesh):
    model = Backbone()
    part = model.classifier.data.chunk(mesh["tp"].size())[mesh.get_local_rank("tp")]
    model.classifier = nn.Parameter(part.clone())
    model.vocab_parallel_group = mesh.get_group("tp")
    return model


generator = torch.Generator().manual_seed(23)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("input_ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, parallel_loss=linear_cross_entropy, ranks={"tp": 2})
    print(titanlite.compare(Backbone, parallel, **options))
