"""Mamba's short causal convolution under context parallelism: a shard begins with the end of the previous one.

Thread: of the kind "causal conv1d at the boundary of context-parallel ranks" (Mamba and gated delta networks in
flash-linear-attention and Megatron-LM), 2024 and 2025.
Correct: the last three tokens of the previous rank are put before the shard; the first rank has zeros, as the plain
model. The gradient of these three tokens goes back to the rank that has them. DDP averages over cp, and the ranks have
the same number of targets.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, KERNEL = 12, 8, 4


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return parts


class Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, i = group, dist.get_rank(group)
        parts = gathered(x.contiguous(), group)
        return parts[i - 1] if i else torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        parts, i = gathered(gradient.contiguous(), ctx.group), dist.get_rank(ctx.group)
        return parts[i + 1] if i + 1 < len(parts) else torch.zeros_like(gradient), None


class Mixer(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.proj_in, self.proj_out = nn.Linear(DIM, 4 * DIM), nn.Linear(2 * DIM, DIM)
        self.conv = nn.Conv1d(2 * DIM, 2 * DIM, KERNEL, groups=2 * DIM)

    def forward(self, x):
        x, gate = self.proj_in(x).chunk(2, -1)
        tail = x[:, 1 - KERNEL :]
        before = torch.zeros_like(tail) if self.group is None else Before.apply(tail, self.group)
        x = self.conv(torch.cat([before, x], 1).transpose(1, 2)).transpose(1, 2)
        return self.proj_out(silu(x) * silu(gate))


class Model(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=1e-6) for _ in range(3))
        self.blocks = nn.ModuleList(Mixer(group) for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    group = mesh.get_group("cp")
    return DistributedDataParallel(Model(group), process_group=group)


generator = torch.Generator().manual_seed(39)


def draw():
    return torch.randint(VOCAB, (3, 12), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
