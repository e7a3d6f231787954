"""An image classifier in a hand-written pipeline of two stages; each step accumulates gradients over images of two resolutions.

Thread: NVIDIA-NeMo/Automodel pull request #3530 "fix(pp): keep accumulated grads across stage re-initialization" (2026): the
stages are set up again whenever the shape changes, and the cleanup after that throws away the gradients accumulated so far.
Fault: Stage.prepare, which measures the shapes for a new resolution, ends by clearing the gradients of its module; it runs in the
middle of the step, when the resolution changes, so the gradients of the first resolution's images are lost.
REPAIR: `self.module.zero_grad(set_to_none=True)` -> `pass`
A right first sentence says: setting up the stages for the second resolution clears the gradients already accumulated in this
step, so only the last resolution's micro-batches train the model, while the reported loss contains both.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WIDTH, CLASSES, ROWS, MICROBATCHES = 8, 5, 4, 2
RESOLUTIONS = {"small": 8, "large": 12}


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.norm = nn.GroupNorm(1 if inputs == 3 else 2, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x):
        y = self.conv1(F.silu(self.norm(x)))
        return self.skip(x) + self.conv2(F.silu(y))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.linear(self.norm(x.mean((2, 3))))


class Classifier(nn.Sequential):
    def __init__(self):
        super().__init__()
        layers = ResBlock(3, WIDTH), ResBlock(WIDTH, WIDTH), ResBlock(WIDTH, WIDTH, 2), Head()
        for index, layer in enumerate(layers):
            self.add_module(f"layer{index}", layer)

    def stage(self, index):
        names = [f"layer{i}" for i in range(4) if i // 2 != index]
        for name in names:
            delattr(self, name)
        return self


class Stage:
    """One of two stages; tensors travel point to point, their shapes are known from a trial run."""

    def __init__(self, module, group):
        self.module, self.group = module, group
        self.first = dist.get_rank(group) == 0
        self.peer = dist.get_global_rank(group, 1 if self.first else 0)
        self.resolution = self.shape = None

    def prepare(self, images):
        """A trial run without a graph, so that the second stage knows what it will receive."""
        if self.first:
            with torch.no_grad():
                shape = torch.tensor(self.module(images).shape)
            dist.send(shape, self.peer, group=self.group)
        else:
            shape = torch.empty(4, dtype=torch.long)
            dist.recv(shape, self.peer, group=self.group)
        self.shape = shape.tolist()
        self.module.zero_grad(set_to_none=True)

    def run(self, images, labels, scale):
        """All micro-batches forward, then all backward, as in GPipe; returns the sum of the losses."""
        images, labels = images.chunk(MICROBATCHES), labels.chunk(MICROBATCHES)
        if images[0].shape != self.resolution:
            self.resolution = images[0].shape
            self.prepare(images[0])
        if self.first:
            outputs = [self.module(x) for x in images]
            for y in outputs:
                dist.send(y.detach().contiguous(), self.peer, group=self.group)
            for y in outputs:
                grad = torch.empty(self.shape, dtype=y.dtype)
                dist.recv(grad, self.peer, group=self.group)
                y.backward(grad)
            return torch.zeros(())
        total, inputs, losses = torch.zeros(()), [], []
        for target in labels:
            x = torch.empty(self.shape, dtype=torch.get_default_dtype())
            dist.recv(x, self.peer, group=self.group)
            inputs.append(x.requires_grad_())
            losses.append(F.cross_entropy(self.module(x), target) * scale)
        for x, value in zip(inputs, losses):
            value.backward()
            dist.send(x.grad, self.peer, group=self.group)
            total = total + value.detach()
        return total


def plain():
    return Classifier()


def parallel(mesh):
    group = mesh.get_group("pp")
    module = Classifier().stage(dist.get_rank(group))
    return module, Stage(module, group)


def loss(model, batch):
    values = [F.cross_entropy(model(images), labels) for images, labels in batch.values()]
    return torch.stack(values).mean()


def step(built, batch):
    stage = built[1]
    scale = 1 / (MICROBATCHES * len(batch))
    value = sum(stage.run(images, labels, scale) for images, labels in batch.values())
    dist.all_reduce(value, group=stage.group)
    return value


generator = torch.Generator().manual_seed(3530)


def images(size):
    pixels = torch.randn(ROWS, 3, size, size, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, CLASSES, (ROWS,), generator=generator)


batches = [{name: images(size) for name, size in RESOLUTIONS.items()} for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"pp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
