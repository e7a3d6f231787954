"""RWKV under context parallelism: the token shift of the channel mix begins every shard with zeros.

Thread: of the kind "token shift / causal conv1d at the boundary of context-parallel ranks" (RWKV and Mamba trainers,
flash-linear-attention, NeMo hybrid models under CP), 2024 and 2025.
Wrong: time_mix gets the last token of the previous rank for its shift. channel_mix shifts with zeros, as at the
beginning of a sequence, so the first token of rank 1 is mixed with zero in place of its predecessor.
PLACE: blocks.*.channel_mix, forward pass, the first token of rank 1 (first blocks.0.channel_mix); backward: the
gradient that the last token of rank 0 should get from it
KIND: shift across the sequence-shard border padded with zeros instead of the previous rank's last token
REPAIR: `previous = torch.zeros_like(x[:, :1])` -> `previous = before(x[:, -1:], self.group)`
EXPECT: in the forward pass, blocks.0.channel_mix is the first module whose output differs (within it the input of key),
on rank 1 only, at the first token of its shard (global token 6): it is mixed with zeros, not with the last token of
rank 0. Send the last token to the next rank, as in time_mix.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM = 12, 8


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


class Before(torch.autograd.Function):
    """The previous rank's tensor, zeros on the first rank."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, i = group, dist.get_rank(group)
        parts = gathered(x.contiguous(), group)
        return parts[i - 1] if i else torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        parts, i = gathered(gradient.contiguous(), ctx.group), dist.get_rank(ctx.group)
        return parts[i + 1] if i + 1 < len(parts) else torch.zeros_like(gradient), None


def before(x, group):
    return torch.zeros_like(x) if group is None else Before.apply(x, group)


class TimeMix(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, self.mu = group, nn.Parameter(torch.rand(DIM))
        self.receptance, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        previous = before(x[:, -1:], self.group)
        shifted = torch.cat([previous, x[:, :-1]], 1)
        x = self.mu * x + (1 - self.mu) * shifted
        return torch.sigmoid(self.receptance(x)) * self.value(x)


class ChannelMix(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, self.mu = group, nn.Parameter(torch.rand(DIM))
        self.key, self.value = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        previous = torch.zeros_like(x[:, :1])
        shifted = torch.cat([previous, x[:, :-1]], 1)
        x = self.mu * x + (1 - self.mu) * shifted
        return self.value(torch.relu(self.key(x)).square())


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.time_mix, self.channel_mix = TimeMix(group), ChannelMix(group)

    def forward(self, x):
        x = x + self.time_mix(self.norm1(x))
        return x + self.channel_mix(self.norm2(x))


class Model(nn.Module):
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
    return DistributedDataParallel(Model(group), process_group=group)


generator = torch.Generator().manual_seed(21)


def draw():
    return torch.randint(VOCAB, (3, 12), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
