"""Semi-supervised segmentation of polyps with a mean teacher, DDP and activation checkpointing of the student's blocks.

Thread: facebookresearch/d2go pull request #578 "remove AC prefix from EMA to make it compatible with loading" (2023):
the EMA goes through named_parameters(), where the wrapper of activation checkpointing leaves its prefix
"_checkpoint_wrapped_module"; met again in Tencent-Hunyuan/UniRL pull request #302 (2026), where names are compared.
Fault: MeanTeacher.update_teacher looks the teacher's names up among the student's; in parallel the student's blocks are
wrapped by checkpoint_wrapper, their parameters have other names and are passed over; the teacher's blocks never move.
REPAIR: `student = dict(self.student.named_parameters())` -> `student = self.student.state_dict(keep_vars=True)`
A right first sentence says: the teacher's moving average skips all parameters in checkpointed blocks, because their
names in named_parameters() have the prefix _checkpoint_wrapped_module; only stem and head of the teacher are updated,
so from the second step on the consistency loss has wrong targets.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

import titanlite

WIDTH, SIDE, ROWS, BLOCKS, DECAY, CONSISTENCY = 8, 8, 8, 3, 0.8, 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.conv1 = nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1)
        self.conv2 = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x):
        return x + self.conv2(F.gelu(self.conv1(self.norm(x))))


class SegmentationNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(1)


class MeanTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = SegmentationNet()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def update_teacher(self):
        student = dict(self.student.named_parameters())
        for name, parameter in self.teacher.named_parameters():
            if name in student:
                parameter.lerp_(student[name], 1 - DECAY)

    def forward(self, batch):
        self.update_teacher()
        supervised = F.binary_cross_entropy_with_logits(
            self.student(batch["labelled"]), batch["masks"]
        )
        with torch.no_grad():
            target = self.teacher(batch["unlabelled"]).sigmoid()
        predicted = self.student(batch["unlabelled"] + batch["perturbation"]).sigmoid()
        return supervised + CONSISTENCY * F.mse_loss(predicted, target)


def plain():
    return MeanTeacher()


def parallel(mesh):
    model, group = MeanTeacher(), mesh.get_group("dp")
    apply_activation_checkpointing(
        model.student,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: isinstance(module, Block),
    )
    return DistributedDataParallel(model, process_group=group), group


def loss(model, batch):
    return model(batch)


def step(built, batch):
    model, group = built
    value = model(batch)
    value.backward()
    reported = value.detach().clone()
    dist.all_reduce(reported, group=group)
    return reported / dist.get_world_size(group)


generator = torch.Generator().manual_seed(578)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def endoscopies():
    labelled = normal(ROWS, 3, SIDE, SIDE)
    return {
        "labelled": labelled,
        "masks": (F.avg_pool2d(labelled.mean(1), 3, 1, 1) > 0.1).double(),
        "unlabelled": normal(ROWS, 3, SIDE, SIDE),
        "perturbation": 0.3 * normal(ROWS, 3, SIDE, SIDE),
    }


batches = [endoscopies() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
