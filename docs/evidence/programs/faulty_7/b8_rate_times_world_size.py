"""A DDP script from Horovod's time: the learning rate is multiplied by the number of ranks, the batch is not larger.

Thread: https://github.com/spellml/deeplab-voc-2012/issues/3 "General distributed training query" ("the learning rate is
multiplied by world size"), 2020-09-03; https://github.com/mosaicml/diffusion/issues/17, 2023-05-19, and many others.
Wrong: the global batch is split over the ranks and DDP averages, so the gradients are those of the plain model. The
optimizer takes twice its learning rate.
PLACE: the optimizer step of all parameters (the parameter group's lr)
KIND: learning rate multiplied by the world size although the global batch is unchanged
REPAIR: `lr=RATE * mesh["dp"].size()` -> `lr=RATE`
EXPECT: the loss and all gradients of step 1 agree, the weights after the optimizer step differ, all of them, on all
ranks: the update is twice as large, since the learning rate is 2 times the reference's (0.002, not 0.001), that is,
multiplied by the number of ranks.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

RATE, CLASSES = 1e-3, 5


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(x + torch.relu(self.body(x)))


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["mask"])


def parallel(mesh):
    model = DistributedDataParallel(Segmenter(), process_group=mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE * mesh["dp"].size())
    return model, optimizer


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(12)
batches = [
    {
        "image": torch.randn(4, 3, 6, 6, generator=generator),
        "mask": torch.randint(CLASSES, (4, 6, 6), generator=generator),
    }
    for _ in range(3)
]
arguments = Segmenter, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
