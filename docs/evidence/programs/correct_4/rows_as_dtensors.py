"""Each rank's rows become a DTensor and are cut differently before the model.

Thread: https://github.com/pytorch/pytorch/pull/143883 "[dtensor] add src_data_rank to distribute_tensor API",
2024-12-26.
Right: from_local declares the rows as the shard; they are then replicated and dealt out in turn, every second row to
each rank, so a rank trains on other rows than it has read, but each row is trained on once.
Must not be accused: rows that change the rank, equally many on each.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite


class Regressor(nn.Module):
    mesh = None

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x):
        return self.down(self.norm(torch.relu(self.up(x))))


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = DistributedDataParallel(Regressor(), process_group=mesh.get_group("dp"))
    model.mesh = mesh["dp"]
    return model


def prepare(batch, mesh):
    rank, size = mesh.get_local_rank(), mesh.size()
    rows = {name: DTensor.from_local(t, mesh, [Shard(0)]) for name, t in batch.items()}
    rows = {name: t.redistribute(placements=[Replicate()]) for name, t in rows.items()}
    return {name: t.to_local()[rank::size] for name, t in rows.items()}


def parallel_loss(model, batch):
    batch = prepare(batch, model.mesh)
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(88838)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 2, generator=generator)}
    for _ in range(3)
]
arguments = Regressor, parallel
options = dict(batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
