"""A communication hook that gathers all gradients and averages them itself, on interleaved samples.

Thread: https://github.com/pytorch/pytorch/pull/43310 "DDP communication hook examples", 2020-08-20
(allgather_then_aggregate_hook).
Right: the mean of the gathered buckets is what an all_reduce would give. Rank r reads the samples r,
r + 4, r + 8 of the batch, as DistributedSampler does without shuffling.
Must not be accused: a hook that divides, or parts of the batch that are no consecutive rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite


def allgather_then_aggregate_hook(process_group, bucket):
    group = process_group or dist.group.WORLD
    tensor = bucket.buffer()
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    future = torch.futures.Future()
    future.set_result(torch.stack(gathered).mean(0))
    return future


class Siren(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(7, 18), nn.Linear(18, 18), nn.Linear(18, 5)])

    def forward(self, x):
        for layer in self.net[:-1]:
            x = torch.sin(layer(x))
        return self.net[-1](x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def interleaved(batch, mesh):
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: value[rank::world] for name, value in batch.items()}


def build():
    model = DistributedDataParallel(Siren())
    model.register_comm_hook(None, allgather_then_aggregate_hook)
    return model


generator = torch.Generator().manual_seed(433)
batches = [
    {
        "x": torch.randn(12, 7, generator=generator),
        "y": torch.randint(5, (12,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 4}, split=interleaved)
    print(titanlite.compare(Siren, build, **options))
