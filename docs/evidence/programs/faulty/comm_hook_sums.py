"""A DDP communication hook that all-reduces without dividing.

Thread: https://github.com/pytorch/pytorch/pull/42399 "DDP communication hook: skip dividing grads by
world_size if hook registered.", 2020-08-01.
Wrong: with a hook, DDP does not divide by the world size; this hook relies on it.
A right diagnosis says: all gradients are 4 times too large, and 4 is the degree of dp: they are
summed, not averaged.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.fc = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        return self.fc(torch.relu(self.conv2(x)).flatten(1))


def allreduce_hook(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def build(mesh):
    model = DDP(Net())
    model.register_comm_hook(mesh.get_group(), allreduce_hook)
    return model


generator = torch.Generator().manual_seed(3)
batches = [
    (torch.randn(8, 1, 8, 8, generator=generator), torch.randn(8, 5, generator=generator))
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 4}, split="dp")
    print(titanlite.compare(Net, build, **options))
