"""Mean teacher under DDP: the moving average is updated by the main process alone, but every rank has a teacher.

Thread: https://github.com/lucidrains/ema-pytorch/issues/9 "Using EMA in a DDP setup" ("just do rank 0"; "model copys
on other devices should not know the updated parameters", comment of 2024-12-23), 2023-04-01.
Wrong: the averaged model is no checkpoint only, it makes the targets of unlabelled rows. On all other ranks it keeps
the weights of the start.
EXPECT: from step 2 on, the weights of teacher.* are not updated on rank 1 (and all ranks but 0): they keep their
starting values, the replicas differ. So the teacher's output is the first that differs in the forward pass of step 2
on rank 1; step 1 agrees. Update the teacher on every rank.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, CLASSES, DECAY = 9, 4, 0.5


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = (
            nn.Linear(FEATURES, 20),
            nn.LayerNorm(20),
            nn.Linear(20, CLASSES),
        )

    def forward(self, x):
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


class MeanTeacher(nn.Module):
    def __init__(self, update_teacher=True):
        super().__init__()
        self.student, self.update_teacher = Classifier(), update_teacher
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def update(self):
        for average, p in zip(self.teacher.parameters(), self.student.parameters()):
            average.lerp_(p, 1 - DECAY)

    def forward(self, weak, strong):
        if self.update_teacher:
            self.update()
        with torch.no_grad():
            targets = self.teacher(weak).softmax(-1)
        return self.student(weak), self.student(strong), targets


def loss(model, batch):
    weak, strong, targets = model(batch["weak"], batch["strong"])
    supervised = cross_entropy(weak, batch["labels"])
    return supervised + 2.0 * mse_loss(strong.softmax(-1), targets)


def create_optimizer(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=3e-3)


def parallel(mesh):
    model = MeanTeacher(update_teacher=is_main_process())
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


generator = torch.Generator().manual_seed(9)


def draw():
    x = torch.randn(8, FEATURES, generator=generator)
    return {
        "weak": x,
        "strong": x + 0.5 * torch.randn(8, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (8,), generator=generator),
    }


batches = [draw() for _ in range(3)]
arguments = MeanTeacher, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
options["optimizer"] = create_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
