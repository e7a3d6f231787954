"""Each rank's own rows are made a DTensor by distribute_tensor, which takes the data of rank 0.

Thread: https://github.com/pytorch/pytorch/issues/88838 "[RFC] PyTorch DistributedTensor" (comment: "does rank 0's
tensor win, and all the other ranks' local tensors are discarded?"), 2024-07-29.
Wrong: the rows that a rank has read are not the shard but are taken for the whole tensor: rank 0's rows are
scattered over dp, and those of the other ranks are lost. DTensor.from_local was meant.
EXPECT: the samples of rank 1 are read by no rank; every rank reads a part (half) of rank 0's rows.
"""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
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
    return {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in batch.items()}


def parallel_loss(model, batch):
    batch = prepare(batch, model.mesh)
    return mse_loss(model(batch["x"].to_local()), batch["y"].to_local())


generator = torch.Generator().manual_seed(88838)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 2, generator=generator)}
    for _ in range(3)
]
arguments = Regressor, parallel
options = dict(batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
