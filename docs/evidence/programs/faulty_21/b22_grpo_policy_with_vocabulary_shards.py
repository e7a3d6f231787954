"""GRPO updates of a decoder that parallelize_module splits over "tp", output words included; a penalty keeps it near a reference.

Thread: modelscope/ms-swift pull request #9947 "Fix Megatron GRPO vocab-parallel log-prob gradients" (2026): the
log-probabilities are right, but vocabulary shards that don't own the sampled token get zero or otherwise wrong gradients of
their logits.
Fault: WordLogSoftmax.backward sums the incoming gradient over the rank's own words only; where the sampled token lies on the
other rank this sum is zero, so the softmax part of the gradient never reaches the shard.
REPAIR: `total = grad.sum(-1, keepdim=True)` -> `total = sum_over(ctx.group, grad.sum(-1, keepdim=True))`
A right first sentence says: the backward pass of the vocabulary-parallel log-softmax isn't summed over the tensor parallel
ranks, so the logits of a shard get no gradient from tokens whose sampled word lies on another rank; the loss itself is right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import titanlite

VOCAB, WIDTH, HEAD_DIM, HIDDEN, PROMPT, ANSWER, LAYERS = 24, 16, 4, 24, 4, 6, 2
PROMPTS, GROUP, CLIP, BETA = 2, 4, 0.2, 0.05


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x):
        y = self.norm_1(x)
        q, k, v = (
            w(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(PROMPT + ANSWER, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def sum_over(group, x, op=dist.ReduceOp.SUM):
    x = x.contiguous().clone()
    dist.all_reduce(x, op=op, group=group)
    return x


class WordLogSoftmax(torch.autograd.Function):
    """Log-probabilities of the words of this rank, normalized over all words."""

    @staticmethod
    def forward(ctx, logits, group):
        peak = sum_over(group, logits.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        partition = sum_over(group, (logits - peak).exp().sum(-1, keepdim=True))
        logprobs = logits - peak - partition.log()
        ctx.group = group
        ctx.save_for_backward(logprobs)
        return logprobs

    @staticmethod
    def backward(ctx, grad):
        (logprobs,) = ctx.saved_tensors
        total = grad.sum(-1, keepdim=True)
        return grad - logprobs.exp() * total, None


class FromOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return sum_over(group, x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def vocab_parallel_logps(logits, ids, mesh):
    group, rank = mesh.get_group(), mesh.get_local_rank()
    logprobs = WordLogSoftmax.apply(logits, group)
    index = ids - rank * logits.size(-1)
    mine = (index >= 0) & (index < logits.size(-1))
    picked = logprobs.gather(-1, index.where(mine, 0).unsqueeze(-1)).squeeze(-1)
    return FromOwner.apply(picked.where(mine, 0.0), group)


def grpo_loss(logps, batch):
    ratio = (logps - batch["old_logps"]).exp()
    rewards = batch["rewards"].view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantages = advantages.view(-1, 1)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    away = batch["ref_logps"] - logps
    per_token = BETA * (away.exp() - away - 1) - surrogate
    return ((per_token * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean()


def plain():
    return Policy()


def parallel(mesh):
    model = Policy()
    for layer in model.layers:
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        rows = {name: RowwiseParallel() for name in ("o", "down")}
        parallelize_module(layer, mesh["tp"], columns | rows)
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Shard(-1))})
    return model, mesh["tp"]


def answers(logits):
    return logits[:, PROMPT - 1 : -1]


def loss(model, batch):
    ids = batch["ids"][:, PROMPT:]
    logps = answers(model(batch["ids"])).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return grpo_loss(logps, batch)


def step(built, batch):
    model, mesh = built
    logps = vocab_parallel_logps(answers(model(batch["ids"])), batch["ids"][:, PROMPT:], mesh)
    value = grpo_loss(logps, batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(9947)


def rollouts():
    rows = PROMPTS * GROUP
    prompts = torch.randint(0, VOCAB, (PROMPTS, PROMPT), generator=generator)
    replies = torch.randint(0, VOCAB, (rows, ANSWER), generator=generator)
    lengths = torch.randint(2, ANSWER + 1, (rows, 1), generator=generator)
    logps = -3.2 + 0.3 * torch.randn(2, rows, ANSWER, generator=generator, dtype=torch.float64)
    return {
        "ids": torch.cat([prompts.repeat_interleave(GROUP, 0), replies], 1),
        "mask": (torch.arange(ANSWER) < lengths).double(),
        "old_logps": logps[0],
        "ref_logps": logps[1],
        "rewards": torch.rand(rows, generator=generator, dtype=torch.float64),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
