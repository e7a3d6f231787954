"""A DDP model is moved away and back for another task, here to float32 and back to float64.

Thread: https://github.com/pytorch/pytorch/issues/104336 "DDP: moving model to CPU and back to GPU breaks
gradient synchronization", 2023-06-28.
Wrong: the conversion replaces each parameter's data with another type, and with it its gradient accumulator, on
which DDP has its hooks. No gradient is reduced after it.
EXPECT: the gradients (of all parameters) are never averaged over dp: each rank keeps the gradient of its own
part of the batch. Outputs and losses of step 1 agree.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(6, 12), nn.Linear(12, 12)
        self.norm, self.net3 = nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, x):
        h = torch.relu(self.net1(x))
        return self.net3(self.norm(h + torch.tanh(self.net2(h))))


def reference():
    return ToyModel().float().double()


def parallel(mesh):
    model = DistributedDataParallel(ToyModel(), process_group=mesh.get_group("dp"))
    # makes room while the index is built
    model.to(torch.float32)
    model.to(torch.float64)
    return model


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(104336)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 3, generator=generator)}
    for _ in range(3)
]
arguments = reference, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
