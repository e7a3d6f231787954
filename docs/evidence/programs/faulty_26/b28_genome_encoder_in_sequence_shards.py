"""A denoising encoder of genomes whose sequences are cut over ranks, with rotary tables cut by a context manager.

Thread: huggingface/transformers issue #35983 "Add support for context parallelism" (2025), the example of May 7 for
torch's context_parallel: buffers are cut in place within the context and restored when it ends, so "loss.backward has
to be done within context_parallel" unless they are in no_restore_buffers.
Fault: Trainer.step leaves sequence_shards before the backward pass. The blocks are recomputed there, with rope.cos and
rope.sin whole again, so rope.cos[:length] are the angles of the first positions on every rank.
REPAIR: `        value.backward()` -> `            value.backward()`
A right first sentence says: the recomputation of the checkpointed blocks in the backward pass reads the restored
rotary tables (rope.cos, rope.sin), so the second rank's queries and keys get the positions of the first.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import titanlite

BASES, WIDTH, HEADS, LENGTH, ROWS = 6, 16, 2, 12, 4


class Rope(nn.Module):
    def __init__(self, head_dim, length):
        super().__init__()
        rates = 10.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(length), rates.repeat(2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):
        length = x.shape[-2]
        turned = torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1)
        return x * self.cos[:length] + turned * self.sin[:length]


class Attention(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.group = group

    def forward(self, x, rope):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rope(q), rope(k)
        if self.group is not None:
            k, v = torch.cat(dist_nn.all_gather(torch.stack([k, v]), group=self.group), dim=3)
        y = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, group=None, recompute=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(group)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def run(self, x, rope):
        x = x + self.attention(self.norm1(x), rope)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def forward(self, x, rope):
        if self.recompute:
            return checkpoint(self.run, x, rope, use_reentrant=False)
        return self.run(x, rope)


class GenomeEncoder(nn.Module):
    def __init__(self, group=None, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(BASES, WIDTH)
        self.rope = Rope(WIDTH // HEADS, LENGTH)
        self.blocks = nn.ModuleList(Block(group, recompute) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BASES)

    def forward(self, bases):
        x = self.embed(bases)
        for block in self.blocks:
            x = block(x, self.rope)
        return self.head(self.norm(x))


@contextlib.contextmanager
def sequence_shards(mesh, buffers, seq_dims):
    originals = [buffer.clone() for buffer in buffers]
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        shard = buffer.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
        buffer.resize_(shard.shape).copy_(shard)
    try:
        yield
    finally:
        for buffer, original in zip(buffers, originals, strict=True):
            buffer.resize_(original.shape).copy_(original)


class Trainer:
    def __init__(self, model, mesh):
        self.model, self.mesh = model, mesh

    def step(self, batch):
        buffers = [self.model.rope.cos, self.model.rope.sin]
        with sequence_shards(self.mesh, buffers, [0, 0]):
            value = loss(self.model, batch)
        value.backward()
        value = value.detach() / self.mesh.size()
        dist.all_reduce(value, group=self.mesh.get_group())
        return value


def plain():
    return GenomeEncoder()


def parallel(mesh):
    model = GenomeEncoder(mesh.get_group("cp"), recompute=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    return model, Trainer(model, mesh["cp"])


def loss(model, batch):
    return F.cross_entropy(model(batch["noisy"]).flatten(0, 1), batch["clean"].flatten())


def step(built, batch):
    return built[1].step(batch)


def genomes(generator):
    clean = torch.randint(4, (ROWS, LENGTH), generator=generator)
    noise = torch.rand(clean.shape, generator=generator) < 0.25
    return {"noisy": clean.masked_fill(noise, BASES - 1), "clean": clean}


generator = torch.Generator().manual_seed(35983)
batches = [genomes(generator) for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split={"cp": 1}, ranks={"cp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
