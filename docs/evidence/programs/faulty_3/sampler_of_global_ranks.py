"""FSDP2 and tensor parallelism with a sampler that takes every rank for a data-parallel one.

Thread: https://github.com/deepspeedai/DeepSpeed/issues/99 "DeepSpeed using DistributedSampler with model
parallelism", 2020-02-21 (it "queries the global world size and rank information").
Wrong: each of the four ranks reads its own quarter of the batch, also the ranks of one tensor-parallel group,
whose shards of a layer are then applied to different samples.
A right diagnosis says: the ranks of tp read different samples (a quarter each): they have to read the same,
and the batch is to be split over dp only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DistributedSampler

import titanlite

DIM, HIDDEN, VOCAB, BATCH = 16, 32, 20, 8


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.intermediate, self.output = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.output(gelu(self.intermediate(self.norm(x))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.ModuleList(FeedForward() for _ in range(2))
        self.cls = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.encoder:
            x = layer(x)
        return self.cls(x)


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def initialize(mesh):
    plan = {"encoder.*.intermediate": ColwiseParallel(), "encoder.*.output": RowwiseParallel()}
    model = parallelize_module(Bert(), mesh["tp"], plan)
    for layer in model.encoder:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def load(batch, mesh):
    sampler = DistributedSampler(
        range(BATCH), num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=False
    )
    rows = list(sampler)
    return {name: values[rows] for name, values in batch.items()}


generator = torch.Generator().manual_seed(99)
batches = [
    {name: torch.randint(VOCAB, (BATCH, 5), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2, "tp": 2}, split=load)
    print(titanlite.compare(Bert, initialize, **options))
