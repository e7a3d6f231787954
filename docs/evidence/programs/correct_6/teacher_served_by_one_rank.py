"""Distillation under DDP: one rank runs the teacher on the rows of all, and sends each rank the logits of its rows.

Thread: https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/352 "Distill megatron - test Draft WIP" (where
to compute the teacher's logits), 2022-09-28.
Right: inputs are gathered to rank 0, which has the teacher, and logits are scattered. The teacher is frozen, so no
gradient has to go back.
Must not be accused: a module that no rank but one calls, on the whole batch; gather and scatter without gradient;
frozen weights that the others hold and never use.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, CLASSES, TEMPERATURE, ALPHA = 8, 5, 2.0, 0.7


def mlp(width):
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, CLASSES)
    )


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(12), mlp(40).requires_grad_(False)
        with torch.no_grad():
            self.teacher[3].weight.mul_(4)


class TeacherServer:
    def __init__(self, teacher, group):
        self.teacher, self.group = teacher, group

    @torch.no_grad()
    def __call__(self, x):
        logits = x.new_empty(len(x), CLASSES)
        if self.group.rank() == 0:
            parts = [torch.empty_like(x) for _ in range(self.group.size())]
            dist.gather(x, parts, 0, group=self.group)
            answers = self.teacher(torch.cat(parts)).chunk(self.group.size())
            dist.scatter(logits, [a.contiguous() for a in answers], 0, group=self.group)
        else:
            dist.gather(x, None, 0, group=self.group)
            dist.scatter(logits, None, 0, group=self.group)
        return logits


def distillation_loss(logits, teacher_logits, labels):
    soft = kl_div(
        (logits / TEMPERATURE).log_softmax(-1),
        (teacher_logits / TEMPERATURE).log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )
    return ALPHA * TEMPERATURE**2 * soft + (1 - ALPHA) * cross_entropy(logits, labels)


def loss(model, batch):
    with torch.no_grad():
        teacher_logits = model.teacher(batch["x"])
    return distillation_loss(model.student(batch["x"]), teacher_logits, batch["labels"])


def make_optimizer(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=2e-3)


def parallel(mesh):
    model, group = Distillation(), mesh.get_group("dp")
    server = TeacherServer(model.teacher, group)
    model.student = DistributedDataParallel(model.student, process_group=group)
    return model, server


def step(built, batch):
    model, server = built
    teacher_logits = server(batch["x"])
    value = distillation_loss(model.student(batch["x"]), teacher_logits, batch["labels"])
    value.backward()
    return value.detach()


def name_without_ddp(name):
    return name.replace("student.module.", "student.")


generator = torch.Generator().manual_seed(352)
batches = [
    {
        "x": torch.randn(9, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (9,), generator=generator),
    }
    for _ in range(3)
]
arguments = Distillation, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 3}, split="dp", step=step)
options.update(rename=name_without_ddp, optimizer=make_optimizer)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
