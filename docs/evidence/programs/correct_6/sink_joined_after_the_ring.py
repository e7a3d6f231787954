"""Ring attention with a learned sink per head: the ring knows no sink, its result is scaled by a sigmoid at the end.

Thread: https://github.com/allenai/OLMo-core/pull/347 "GPT-OSS Attention sinks using flex-attn", 2025-08-17.
Right: an extra logit s in the softmax multiplies the output with sigmoid(lse - s), where lse is the log-sum-exp of all
keys. It is known after the last ring step, and then the sink counts once.
Must not be accused: that no block of the ring has the sink, or that the gradient of the sinks comes from each rank's
own queries.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HEADS, KV_HEADS, HEAD = 15, 16, 4, 2, 4


class Pass(torch.autograd.Function):
    """sends to the previous rank and receives from the next one"""

    @staticmethod
    def forward(ctx, x, group, hop=-1):
        ctx.group, ctx.hop, received = group, hop, torch.empty_like(x)
        to, source = (group.rank() + hop) % group.size(), (group.rank() - hop) % group.size()
        ops = [
            dist.P2POp(dist.isend, x.contiguous(), to, group),
            dist.P2POp(dist.irecv, received, source, group),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return received

    @staticmethod
    def backward(ctx, grad):
        return Pass.apply(grad, ctx.group, -ctx.hop), None, None


class SinkAttention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.kv_proj = nn.Linear(DIM, 2 * KV_HEADS * HEAD)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def scores(self, q, k, q_start, k_start):
        scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT / HEAD**0.5
        rows, columns = torch.arange(q.shape[2]) + q_start, torch.arange(k.shape[2]) + k_start
        return scores.masked_fill(columns > rows[:, None], -1e30)

    def plain(self, q, k, v):
        sinks = self.sinks.view(HEADS, 1, 1).expand(len(q), HEADS, q.shape[2], 1)
        weights = torch.cat([self.scores(q, k, 0, 0), sinks], -1).softmax(-1)[..., :-1]
        return weights @ v.repeat_interleave(HEADS // KV_HEADS, 1)

    def ring(self, q, k, v):
        rank, size, length = self.group.rank(), self.group.size(), q.shape[2]
        kv, top = torch.cat([k, v], -1), torch.full((*q.shape[:3], 1), -1e30)
        numerator, denominator = torch.zeros_like(q), torch.zeros_like(top)
        for hop in range(size):
            k, v = kv.chunk(2, -1)
            scores = self.scores(q, k, rank * length, (rank + hop) % size * length)
            new = torch.maximum(top, scores.amax(-1, keepdim=True).detach())
            exp, scale = (scores - new).exp(), (top - new).exp()
            v = v.repeat_interleave(HEADS // KV_HEADS, 1)
            numerator = numerator * scale + exp @ v
            denominator, top = denominator * scale + exp.sum(-1, keepdim=True), new
            if hop < size - 1:
                kv = Pass.apply(kv, self.group)
        lse = top + denominator.log()
        return numerator / denominator * torch.sigmoid(lse - self.sinks.view(HEADS, 1, 1))

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        k, v = self.kv_proj(x).unflatten(-1, (KV_HEADS, 2 * HEAD)).transpose(1, 2).chunk(2, -1)
        y = self.plain(q, k, v) if self.group is None else self.ring(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.attentions = nn.ModuleList(SinkAttention() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, attention in zip(self.norms, self.attentions):
            x = x + attention(norm(x))
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = LM()
    for attention in model.attentions:
        attention.group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(347)
batches = [
    {n: torch.randint(VOCAB, (2, 12), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = LM, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 3}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
