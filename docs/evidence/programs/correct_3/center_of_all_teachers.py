"""DINO: the center of the teacher's outputs is a moving average over the batches of all ranks.

Thread: https://github.com/vturrisi/solo-learn/pull/59 "added dino", review of 2021-06-29 (is the division by the
world size inside or outside of the `if`?).
Right: the sums are all-reduced and divided by the number of all rows. The teacher is a moving average of the
student, has no gradient and is not wrapped; DDP wraps the student alone.
Must not be accused: an all-reduce under no_grad, weights that move outside the optimizer, a module without
gradients, two passes through the same student.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import log_softmax, softmax
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

PIXELS, WIDTH, PROTOTYPES, MOMENTUM = 12, 24, 10, 0.9


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PROTOTYPES))

    def forward(self, x):
        return self.head(self.body(x))


class Dino(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Backbone()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, PROTOTYPES))

    @torch.no_grad()
    def update_teacher(self):
        student = getattr(self.student, "module", self.student)
        for t, s in zip(self.teacher.parameters(), student.parameters()):
            t.mul_(MOMENTUM).add_(s, alpha=1 - MOMENTUM)

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center, rows = teacher_output.sum(0, keepdim=True), len(teacher_output)
        if isinstance(self.student, DDP):
            dist.all_reduce(batch_center)
            rows *= dist.get_world_size()
        self.center = self.center * MOMENTUM + batch_center / rows * (1 - MOMENTUM)

    def forward(self, views):
        self.update_teacher()
        with torch.no_grad():
            teacher_output = self.teacher(views[:, 0])
            targets = softmax((teacher_output - self.center) / 0.5, -1)
        total = 0
        for view in (views[:, 1], views[:, 2]):
            total = total - (targets * log_softmax(self.student(view), -1)).sum(-1).mean()
        self.update_center(teacher_output)
        return total / 2


def loss(model, batch):
    return model(batch)


def distributed():
    model = Dino()
    model.student = DDP(model.student)
    return model


generator = torch.Generator().manual_seed(59)
batches = [torch.randn(8, 3, PIXELS, generator=generator) for _ in range(3)]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Dino, distributed, batches=batches, loss=loss, ranks={"dp": 2}, split="dp"
        )
    )
