"""A static loss scale: the scaled gradients are clipped by a threshold with the same scale, and unscaled after it.

Thread: https://github.com/rwth-i6/returnn/pull/1595 "Torch: unscale gradients before noise and clipping",
2024-07-22; also https://github.com/pytorch/examples/issues/1196 (2023-10-27).
Right: clipping 1024 g by 1024 c and dividing by 1024 is the same as clipping g by c; the scale is a power of two.
Must not be accused: gradients that are 1024 times too large inside of the backward pass and in the hooks, a clipping
before the unscaling.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

FEATURES, DIM, CLASSES, MAX_NORM, LOSS_SCALE = 7, 20, 4, 0.3, 1024.0


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(FEATURES, DIM), nn.LayerNorm(DIM)
        self.hidden, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + torch.relu(self.hidden(self.norm(x))))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["labels"])


def clip_gradients(model, max_norm):
    grads = [p.grad for p in model.parameters()]
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    for g in grads:
        g.mul_((max_norm / norm).clamp(max=1.0))
    return norm


def clip(model):
    return clip_gradients(model, MAX_NORM)


def create_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, nesterov=True)


def parallel(mesh):
    return Classifier(), mesh.get_group("dp")


def step(built, batch):
    model, group = built
    value = loss(model, batch)
    (value * LOSS_SCALE).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()
    clip_gradients(model, MAX_NORM * LOSS_SCALE)
    for p in model.parameters():
        p.grad /= LOSS_SCALE
    return value.detach()


generator = torch.Generator().manual_seed(1595)
batches = [
    {
        "x": torch.randn(8, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (8,), generator=generator),
    }
    for _ in range(3)
]
arguments = Classifier, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 4}, split="dp", step=step, clip=clip)
options["optimizer"] = create_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
