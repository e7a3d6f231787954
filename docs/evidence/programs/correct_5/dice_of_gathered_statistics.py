"""A batch dice loss under DDP: statistics gathered with a backward pass that returns the own slice alone.

Thread: https://github.com/NVIDIA/apex/issues/162 "run more than one DDP model on one machine" (comment of 2019-02-25,
awesome_allgather_function: "to mimic DataParallel, return only the slice that corresponds to this process's input").
Right: every rank has the dice of the whole batch, and its gradient is that of its own rows. DDP takes the mean over
ranks, so the loss is multiplied by their number before the backward pass.
Must not be accused: a gather without a reduction in its backward pass, a loss times the world size, equal losses on
all ranks though their rows differ.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, CHANNELS, SIZE = 3, 6, 6


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx, grad):
        return grad[dist.get_rank()]


def statistics(logits, labels):
    prediction = logits.softmax(1)
    hot = nn.functional.one_hot(labels, CLASSES).permute(0, 3, 1, 2)
    tp = (prediction * hot).sum((0, 2, 3))
    fp = (prediction * (1 - hot)).sum((0, 2, 3))
    fn = ((1 - prediction) * hot).sum((0, 2, 3))
    return torch.stack([tp, fp, fn])


def dice_loss(tp, fp, fn, smooth=1.0):
    return 1 - ((2 * tp + smooth) / (2 * tp + fp + fn + smooth)).mean()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.bottom = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.up = nn.Conv2d(2 * CHANNELS, CLASSES, 3, padding=1)

    def forward(self, x):
        skip = torch.relu(self.down(x))
        return self.up(torch.cat([skip, torch.relu(self.bottom(skip))], 1))


def loss(model, batch):
    return dice_loss(*statistics(model(batch["images"]), batch["labels"]))


def parallel(mesh):
    return DistributedDataParallel(UNet(), process_group=mesh.get_group("dp"))


def step(model, batch):
    local = statistics(model(batch["images"]), batch["labels"])
    value = dice_loss(*AllGather.apply(local).sum(0))
    (value * dist.get_world_size()).backward()
    return value.detach()


generator = torch.Generator().manual_seed(162)


def draw():
    images = torch.randn(6, 1, SIZE, SIZE, generator=generator)
    labels = (images[:, 0] > torch.linspace(-1.5, 1.5, 6).view(6, 1, 1)).long()
    labels += (images[:, 0] > 1.0).long()
    return {"images": images, "labels": labels}


batches = [draw() for _ in range(3)]
arguments = UNet, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
