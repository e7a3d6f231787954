"""A forgetting transformer whose sequence is cut over the ranks: keys, values and sums of log forget gates are gathered.

Thread: of the kind fla-org/flash-linear-attention issue #217 "[RFC] Support context parallelism" (2025) and
lucidrains/x-transformers issue #281 "forgetting transformers" (2024): "basically mamba 2 style decay but on the attn mask".
Fault: in SplitAttention.decay, the log forget gates are summed up from the start of the rank's own block, before the gather.
REPAIR: `Gather.apply(log_gates.cumsum(1), self.group)` -> `Gather.apply(log_gates, self.group).cumsum(1)`
A right first sentence says: the output of layers.0.attention is wrong on rank 1 only, from the forward pass of step 1 on, while its
queries, keys, values and forget gates agree: the cumulative sum of the log forget gates begins anew in the rank's own block of
tokens instead of going on from the block before, so the decay towards the other rank's keys is wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, logsigmoid
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS, LENGTH = 12, 8, 2, 8


class Gather(torch.autograd.Function):
    """All blocks of tokens; in backward, the sum of the ranks' gradients of the own block."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        blocks = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(blocks, x.contiguous(), group=group)
        return torch.cat(blocks, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, 1)[rank], None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.forget, self.o = nn.Linear(DIM, HEADS), nn.Linear(DIM, DIM)

    def attend(self, q, k, v, decay, first=0):
        """decay: the sum of the log forget gates up to each key; the queries begin with number `first`."""
        queries = torch.arange(first, first + q.shape[1])
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        decay = decay.transpose(1, 2)
        scores = scores + decay[:, :, queries, None] - decay[:, :, None]
        later = torch.arange(k.shape[1]) > queries[:, None]
        p = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.o(torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2))

    def heads(self, x):
        return (f(x).unflatten(-1, (HEADS, -1)) for f in (self.q, self.k, self.v))

    def forward(self, x):
        return self.attend(*self.heads(x), logsigmoid(self.forget(x)).cumsum(1))


class SplitAttention(Attention):
    def decay(self, x):
        log_gates = logsigmoid(self.forget(x))
        return Gather.apply(log_gates.cumsum(1), self.group)

    def forward(self, x):
        q, k, v = self.heads(x)
        k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        return self.attend(q, k, v, self.decay(x), dist.get_rank(self.group) * x.shape[1])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("cp")
    for layer in model.layers:
        layer.attention.__class__, layer.attention.group = SplitAttention, group
    return DistributedDataParallel(model, process_group=group)


rng = torch.Generator().manual_seed(417)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (3, LENGTH + 1), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
