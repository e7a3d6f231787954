"""Metric learning under DDP: the loss has a weight matrix of its own, and only the backbone is wrapped.

Thread: https://github.com/KevinMusgrave/pytorch-metric-learning/issues/710 "Wrapping the loss with
DistributedDataParallel" (CosFace and ArcFace have a W), 2024-08-13.
Wrong: DDP averages the gradients of the backbone. The class centers of the criterion keep the gradient of each
rank's own rows, so their replicas drift apart.
EXPECT: the gradient of criterion.W is not reduced over dp (each rank has that of its own rows); all others agree
in step 1. The weight criterion.W is outside of DDP: all-reduce (average) it or wrap the criterion too.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, normalize
from torch.nn.parallel import DistributedDataParallel

import titanlite

INPUTS, DIM, CLASSES = 10, 8, 5


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm = nn.Linear(INPUTS, 24), nn.LayerNorm(24)
        self.fc2 = nn.Linear(24, DIM)

    def forward(self, x):
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


class CosFaceLoss(nn.Module):
    def __init__(self, margin=0.2, scale=8.0):
        super().__init__()
        self.margin, self.scale = margin, scale
        self.W = nn.Parameter(torch.randn(CLASSES, DIM) * 0.3)

    def forward(self, embeddings, labels):
        cosine = linear(normalize(embeddings), normalize(self.W))
        hot = nn.functional.one_hot(labels, CLASSES)
        return cross_entropy(self.scale * (cosine - self.margin * hot), labels)


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.criterion = Backbone(), CosFaceLoss()

    def distribute(self, group):
        self.backbone = DistributedDataParallel(self.backbone, process_group=group)
        return self

    def training_step(self, x, labels):
        return self.criterion(self.backbone(x), labels)


def loss(trainer, batch):
    return trainer.training_step(batch["x"], batch["labels"])


def parallel(mesh):
    return Trainer().distribute(mesh.get_group("dp"))


def name_in_one_process(name):
    return name.replace("backbone.module.", "backbone.")


generator = torch.Generator().manual_seed(710)
batches = [
    {
        "x": torch.randn(12, INPUTS, generator=generator),
        "labels": torch.randint(CLASSES, (12,), generator=generator),
    }
    for _ in range(3)
]
arguments = Trainer, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
options["rename"] = name_in_one_process

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
