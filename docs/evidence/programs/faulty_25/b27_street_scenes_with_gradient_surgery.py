"""Segmentation, depth and normals of street scenes from one encoder, with PCGrad, on ranks that average by hand.

Thread: median-research-group/LibMTL issue #16 "Pytorch Distributed DataParallel support" (2022), gradient surgery that
could not be run with DDP because of "gradient syncing issues", and WeiChengTseng/Pytorch-PCGrad issue #5 "support
distributed training" (2021).
Fault: DistributedPCGrad.backward projects the tasks' gradients of the own rows and averages what comes out of it over
the ranks; which tasks conflict, and how much is projected away, is decided by each rank for itself.
REPAIR: `self.average(self.surgery(self.pack(losses)))` -> `self.surgery(self.average(self.pack(losses)))`
A right first sentence says: PCGrad's projection is done on each rank's local task gradients before they are averaged
over the ranks (in DistributedPCGrad.backward) instead of after it, so that all gradients differ from the first step on.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import grad

import titanlite

SIZE, CHANNELS, CLASSES, ROWS = 8, 8, 5, 8


class ConvBlock(nn.Module):
    def __init__(self, inputs, stride):
        super().__init__()
        self.conv = nn.Conv2d(inputs, CHANNELS, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(2, CHANNELS)
        self.mix = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x):
        return F.relu(self.mix(F.relu(self.norm(self.conv(x)))))


class Head(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.out = nn.Conv2d(CHANNELS, outputs, 1)

    def forward(self, x):
        return self.out(F.relu(self.conv(F.interpolate(x, scale_factor=2, mode="bilinear"))))


class SceneNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(ConvBlock(3, 1), ConvBlock(CHANNELS, 2))
        outputs = {"segmentation": CLASSES, "depth": 1, "normals": 3}
        self.heads = nn.ModuleDict({task: Head(size) for task, size in outputs.items()})

    def forward(self, image):
        features = self.encoder(image)
        return {task: head(features) for task, head in self.heads.items()}


def task_losses(model, batch):
    out = model(batch["image"])
    normals = F.normalize(out["normals"], dim=1)
    return [
        F.cross_entropy(out["segmentation"], batch["classes"]),
        F.l1_loss(out["depth"].squeeze(1), batch["depth"]),
        (1 - (normals * batch["normals"]).sum(1)).mean(),
    ]


class PCGrad:
    def __init__(self, model):
        self.parameters = list(model.parameters())

    def pack(self, losses):
        rows = []
        for value in losses:
            parts = grad(value, self.parameters, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([part.flatten() for part in parts]))
        return torch.stack(rows)

    def surgery(self, gradients):
        merged = torch.zeros_like(gradients[0])
        for i, gradient in enumerate(gradients):
            for j, other in enumerate(gradients):
                product = gradient @ other
                if i != j and product < 0:
                    gradient = gradient - product / other.square().sum() * other
            merged += gradient
        return merged

    def unpack(self, merged):
        parts = merged.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def value(self, losses):
        """The sum of the losses, with the merged gradients as its gradient."""
        merged = self.unpack(self.surgery(self.pack(losses)))
        linear = sum((p * part).sum() for p, part in zip(self.parameters, merged, strict=True))
        return sum(losses).detach() + linear - linear.detach()


class DistributedPCGrad(PCGrad):
    def __init__(self, model, group):
        super().__init__(model)
        self.group = group

    def average(self, value):
        dist.all_reduce(value, group=self.group)
        return value / self.group.size()

    def backward(self, losses):
        merged = self.average(self.surgery(self.pack(losses)))
        for parameter, part in zip(self.parameters, self.unpack(merged), strict=True):
            parameter.grad = part.clone()


def plain():
    return SceneNetwork()


def parallel(mesh):
    model = SceneNetwork()
    return model, DistributedPCGrad(model, mesh.get_group("dp"))


def loss(model, batch):
    return PCGrad(model).value(task_losses(model, batch))


def step(built, batch):
    built[1].backward(losses := task_losses(built[0], batch))
    return built[1].average(sum(losses).detach())


generator = torch.Generator().manual_seed(16)


def scenes():
    image = torch.randn(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    classes = torch.randint(CLASSES, (ROWS, SIZE, SIZE), generator=generator)
    depth = (1 + classes + 0.3 * image[:, 0]).clamp(min=0.1).log()
    normals = torch.randn(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64) - image
    normals = F.normalize(normals, dim=1)
    return {"image": image, "classes": classes, "depth": depth, "normals": normals}


batches = [scenes() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
