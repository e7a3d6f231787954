"""A DDP communication hook that sends float32, divides by its own count, and casts back.

Thread: https://github.com/pytorch/pytorch/issues/37002 "[RFC] Modularize DistributedDataParallel",
comments of 2021-02-04 and 2021-04-07.
Right: losses are sums; the hook sums gradients and divides by the global batch size. The model is
float32, and so is the communication.
Must not be accused: the hook's sum or its divisor, rounding of float32.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

BATCH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x):
        return self.fc(torch.relu(self.conv2(torch.relu(self.conv1(x)))).flatten(1))


def float32_hook(state, bucket):
    group, divisor = state
    gradients = bucket.buffer()
    compressed = gradients.to(torch.float32) / divisor
    future = dist.all_reduce(compressed, group=group, async_op=True).get_future()
    return future.then(lambda f: gradients.copy_(f.value()[0]))


def plain_loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def step(model, batch):
    loss = (model(batch[0]) - batch[1]).pow(2).mean(1).sum()
    loss.backward()
    return loss.detach() / BATCH


def build(mesh):
    model = DDP(Net())
    model.register_comm_hook((mesh.get_group(), BATCH), float32_hook)
    return model


generator = torch.Generator().manual_seed(14)
batches = [
    (torch.randn(BATCH, 1, 8, 8, generator=generator), torch.randn(BATCH, 5, generator=generator))
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Net,
            build,
            batches=batches,
            loss=plain_loss,
            ranks={"dp": 2},
            split="dp",
            step=step,
            dtype="float32",
        )
    )
