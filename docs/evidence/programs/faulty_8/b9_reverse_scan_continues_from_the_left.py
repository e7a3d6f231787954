"""A bidirectional state-space model under context parallelism: the reverse scan takes its state from the rank before.

Thread: state-spaces/mamba issue #597 "Context parallel implementation for Mamba 2" (2024: the states are passed between
the GPUs) with pull request #52 "Implement bi-directionality" (2023: the reverse direction on the flipped sequence).
Wrong: the reverse direction flips the shard and runs the same scan. But it comes from the end of the sequence: its state
has to come from the following rank, and scan takes that of the previous one in both directions.
PLACE: blocks.*.ssm (first blocks.0.ssm), forward pass, its reverse direction, on both ranks
KIND: reverse scan across sequence shards gets the state of the previous rank instead of the next one
REPAIR: `self.scan(u.flip(1), self.decay_reverse)` -> `self.scan(u.flip(1), self.decay_reverse, reverse=True)`
EXPECT: in the forward pass, blocks.0.ssm is the first module whose output differs, on all ranks, while its inp agrees: its
reverse scan begins rank 1's shard with the state of rank 0 (it should be zero there) and rank 0's with zero (it should be
that of rank 1): in the reverse direction the state has to come from the next rank. The forward direction is right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, STATE = 16, 8, 12


class GatherStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, group):
        ctx.group = group
        parts = [torch.empty_like(state) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, state.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


class BiSsm(nn.Module):
    """Two diagonal linear recurrences, h[t] = a * h[t-1] + u[t], from the left and from the right."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.inp, self.gate = nn.Linear(DIM, STATE), nn.Linear(DIM, 2 * STATE)
        self.decay_forward, self.decay_reverse = (nn.Parameter(torch.rand(STATE)) for _ in range(2))
        self.out = nn.Linear(2 * STATE, DIM)

    def scan(self, u, decay, reverse=False):
        a, length = torch.sigmoid(decay), u.shape[1]
        t = torch.arange(length)
        powers = a ** (t[:, None] - t).clamp(min=0)[..., None] * (t[:, None] >= t)[..., None]
        h = torch.einsum("tsd,bsd->btd", powers, u)
        if self.group is None:
            return h
        states, rank = GatherStates.apply(h[:, -1], self.group), dist.get_rank(self.group)
        before = range(len(states) - 1, rank, -1) if reverse else range(rank)
        carried = torch.zeros_like(h[:, -1])
        for i in before:
            carried = carried * a**length + states[i]
        # The other ranks' states belong to the graph as well, so that all ranks run its collective in backward.
        carried = carried + 0 * states.sum(0)
        return h + a ** (t + 1)[:, None] * carried[:, None]

    def forward(self, x):
        u = self.inp(x)
        left = self.scan(u, self.decay_forward)
        right = self.scan(u.flip(1), self.decay_reverse).flip(1)
        return self.out(torch.cat([left, right], -1) * silu(self.gate(x)))


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.ssm, self.mlp = (
            BiSsm(group),
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)),
        )

    def forward(self, x):
        x = x + self.ssm(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    group = mesh.get_group("cp")
    return DistributedDataParallel(Encoder(group), process_group=group)


generator = torch.Generator().manual_seed(120)


def draw():
    return torch.randint(VOCAB, (3, 12), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Encoder, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
