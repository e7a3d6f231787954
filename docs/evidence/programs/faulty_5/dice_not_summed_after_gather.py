"""Segmentation with a batch dice loss under DDP: the ranks' statistics are gathered and not added up.

Thread: https://github.com/MIC-DKFZ/nnUNet/issues/1354 "bug in MemoryEfficientSoftDiceLoss" ("after allgather, should
intersect be summed on the first dim?"), 2023-03-28.
Wrong: intersections and volumes have one more dimension, the ranks. The dice is taken for each rank and averaged: a
mean of ratios, where the batch dice is the ratio of the sums.
EXPECT: the loss and all gradients differ from step 1 on, and the forward pass of all modules agrees: the loss (a
ratio of sums over the batch, the dice) is computed for each rank's rows and averaged; the statistics have to be
summed over dp first.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, CHANNELS, SIZE = 3, 6, 6


class AllGatherGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class SoftDiceLoss(nn.Module):
    def __init__(self, ddp, smooth=1.0):
        super().__init__()
        self.ddp, self.smooth = ddp, smooth

    def forward(self, logits, labels):
        prediction = logits.softmax(1)
        hot = nn.functional.one_hot(labels, CLASSES).permute(0, 3, 1, 2)
        axes = 0, 2, 3
        intersect = (prediction * hot).sum(axes)
        sum_pred, sum_gt = prediction.sum(axes), hot.sum(axes).to(prediction.dtype)
        if self.ddp:
            intersect = AllGatherGrad.apply(intersect)
            sum_pred = AllGatherGrad.apply(sum_pred)
            sum_gt = AllGatherGrad.apply(sum_gt)
        dice = (2 * intersect + self.smooth) / (sum_pred + sum_gt + self.smooth)
        return 1 - dice.mean()


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
    return SoftDiceLoss(ddp=False)(model(batch["images"]), batch["labels"])


def parallel_loss(model, batch):
    return SoftDiceLoss(ddp=True)(model(batch["images"]), batch["labels"])


def parallel(mesh):
    return DistributedDataParallel(UNet(), process_group=mesh.get_group("dp"))


generator = torch.Generator().manual_seed(1354)


def draw():
    images = torch.randn(6, 1, SIZE, SIZE, generator=generator)
    labels = (images[:, 0] > torch.linspace(-1.5, 1.5, 6).view(6, 1, 1)).long()
    labels += (images[:, 0] > 1.0).long()
    return {"images": images, "labels": labels.clamp(max=CLASSES - 1)}


batches = [draw() for _ in range(3)]
arguments = UNet, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
options["parallel_loss"] = parallel_loss

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
