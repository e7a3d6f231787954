"""A class-balanced loss whose weights come from the labels in the rank's own part of the batch.

Thread: https://github.com/richardaecn/class-balanced-loss/issues/10 "What's the weights in the line 325 of
class-balanced-loss/src/cifar_main.py" (weights of the whole dataset, or of each batch?), 2019-10-15.
Wrong (for equality with one process): the labels are counted on each rank; the counts are not summed over
dp before the effective number of samples is taken.
A right diagnosis says: the logits agree, the loss differs: in class_balanced_weights the counts
(samples_per_class) are those of the rank's own rows and need a sum over dp.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

CLASSES, BETA = 4, 0.9


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(torch.relu(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 16)
        self.blocks = nn.Sequential(ResidualBlock(16), ResidualBlock(16))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, images):
        return self.fc(self.blocks(self.stem(images)))


def class_balanced_weights(labels):
    samples_per_class = torch.bincount(labels, minlength=CLASSES)
    effective_num = 1 - torch.pow(BETA, samples_per_class.clamp(min=1).double())
    weights = (1 - BETA) / effective_num
    return weights / weights.sum() * CLASSES


def cb_loss(model, batch):
    logits = model(batch["images"])
    weights = class_balanced_weights(batch["labels"])
    losses = cross_entropy(logits, batch["labels"], reduction="none")
    return (weights[batch["labels"]] * losses).mean()


def parallel():
    return DDP(Classifier())


def long_tailed(generator):
    images = torch.randn(12, 10, generator=generator)
    chances = torch.tensor([0.5, 0.25, 0.15, 0.1])
    labels = torch.multinomial(chances, 12, replacement=True, generator=generator)
    return {"images": images, "labels": labels}


generator = torch.Generator().manual_seed(10)
batches = [long_tailed(generator) for _ in range(3)]

if __name__ == "__main__":
    options = dict(batches=batches, loss=cb_loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Classifier, parallel, **options))
