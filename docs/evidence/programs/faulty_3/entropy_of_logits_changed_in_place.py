"""PPO under tensor parallelism: the log probabilities shift the logits in place after the entropy kept them.

Thread: https://github.com/verl-project/verl/pull/2484 "[megatron] fix: resolve backward propagation error in
megatron_actor due to shared logits tensor in-place modification", 2025-07-11.
Wrong: VocabParallelEntropy keeps the logits for its backward pass; VocabParallelLogProbs then subtracts the
maximum from the same tensor. Both outputs are right, but the entropy's gradient is computed from shifted
logits with the sum of the unshifted ones.
A right diagnosis says: loss and all outputs agree; the first gradient that differs in the backward pass is
that of the head's output (the logits), on both ranks: the loss's own backward pass (of
VocabParallelEntropy) is wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import log_softmax

import titanlite

DIM, VOCAB, ENTROPY_COEFFICIENT = 16, 20, 0.5


def reduced(x, group, op=dist.ReduceOp.SUM):
    x = x.clone()
    dist.all_reduce(x, op=op, group=group)
    return x


class CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad, ctx.group), None


class VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, group):
        peak = reduced(logits.max(-1, keepdim=True).values, group, dist.ReduceOp.MAX)
        exp = (logits - peak).exp()
        total = reduced(exp.sum(-1, keepdim=True), group)
        softmax = exp / total
        mean_logit = reduced((softmax * logits).sum(-1, keepdim=True), group)
        ctx.logits, ctx.softmax, ctx.mean_logit = logits, softmax, mean_logit
        return (peak + total.log() - mean_logit).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.unsqueeze(-1) * ctx.softmax * (ctx.mean_logit - ctx.logits), None


class VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, group):
        peak = reduced(logits.max(-1, keepdim=True).values, group, dist.ReduceOp.MAX)
        logits -= peak
        exp = logits.exp()
        total = reduced(exp.sum(-1, keepdim=True), group)
        local = labels - group.rank() * logits.shape[-1]
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        chosen = logits.gather(-1, local).squeeze(-1) * mine
        ctx.saved = exp / total, local, mine
        return reduced(chosen, group) - total.log().squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        softmax, local, mine = ctx.saved
        one_hot = torch.zeros_like(softmax).scatter(-1, local, mine.unsqueeze(-1).to(softmax))
        return grad.unsqueeze(-1) * (one_hot - softmax), None, None


class Actor(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.mlp(x))
        return self.head(x if self.group is None else CopyToTensorParallel.apply(x, self.group))


def policy_loss(log_probs, entropy, batch):
    return -(batch["advantages"] * log_probs).mean() - ENTROPY_COEFFICIENT * entropy.mean()


def loss(actor, batch):
    log_p = log_softmax(actor(batch["ids"]), -1)
    chosen = log_p.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    return policy_loss(chosen, -(log_p.exp() * log_p).sum(-1), batch)


def parallel_loss(actor, batch):
    logits = actor(batch["ids"])
    entropy = VocabParallelEntropy.apply(logits, actor.group)
    return policy_loss(
        VocabParallelLogProbs.apply(logits, batch["actions"], actor.group), entropy, batch
    )


def parallel(mesh):
    actor = Actor()
    actor.group = mesh.get_group("tp")
    actor.head.weight.data = actor.head.weight.data.chunk(2)[actor.group.rank()].clone()
    return actor


def draw(generator):
    ids, actions = (torch.randint(VOCAB, (3, 5), generator=generator) for _ in range(2))
    return {"ids": ids, "actions": actions, "advantages": torch.randn(3, 5, generator=generator)}


generator = torch.Generator().manual_seed(2484)
batches = [draw(generator) for _ in range(3)]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"tp": 2})
    print(titanlite.compare(Actor, parallel, **options))
