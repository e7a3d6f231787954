"""Image segmentation with data parallelism by hand: the weight penalty is part of every rank's loss, and the losses are summed.

Thread: tensorflow/models pull request #6195 "Manually scale the loss in Resnet DS model" (2019): the replicas' losses are
added up, so the regularization loss has to be divided by num_replicas_in_sync; of the same kind keras-team/keras pull
request #20609 (2024).
Fault: in step, the cross entropy is divided by the labelled pixels of all ranks, so the ranks' gradients are summed; but
each rank adds the whole penalty of the weights, which is the same on all ranks and so counts once per rank.
REPAIR: `/ pixels + penalty(model)` -> `/ pixels + penalty(model) / dist.get_world_size()`
Expected: the outputs agree; the loss (summed over the ranks) and the gradients of the convolutions' weights are too
large: the penalty's part is counted once per rank, twice in all, because each rank adds it to a loss whose gradients are
summed. The biases, which have no penalty, agree. Divide the penalty by the number of ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

CLASSES, IGNORE, DECAY = 4, 255, 0.02


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, images):
        x = torch.relu(self.stem(images))
        return self.head(x + torch.relu(self.body(x)))


def penalty(model):
    return DECAY * sum(p.square().sum() / 2 for p in model.parameters() if p.ndim > 1)


def pixel_losses(model, batch):
    return cross_entropy(
        model(batch["images"]), batch["labels"], ignore_index=IGNORE, reduction="sum"
    )


def loss(model, batch):
    return pixel_losses(model, batch) / (batch["labels"] != IGNORE).sum() + penalty(model)


def parallel(mesh):
    return Segmenter()


def step(model, batch):
    pixels = (batch["labels"] != IGNORE).sum()
    dist.all_reduce(pixels)
    value = pixel_losses(model, batch) / pixels + penalty(model)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return value


generator = torch.Generator().manual_seed(201)


def draw():
    labels = torch.randint(CLASSES, (6, 5, 5), generator=generator)
    unlabelled = torch.rand(6, 5, 5, generator=generator) < 0.3
    images = torch.randn(6, 3, 5, 5, generator=generator)
    return {"images": images, "labels": labels.masked_fill(unlabelled, IGNORE)}


batches = [draw() for _ in range(3)]
arguments = Segmenter, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
