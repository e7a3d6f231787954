"""A residual network for galaxy images whose branches are cut by channels, with a ParallelStyle of its own.

Might be accused because: batch normalization isn't synchronized and each rank normalizes only its own channels; the
branches compute with local tensors (to_local) of sharded weights; the result of the second convolution is declared
Partial without a reduction in sight, and its bias is outside of the branch; the input is taken by to_local.
Correct because: every rank has the whole batch, and the statistics of a channel need no other channel; gradients of a
shard belong to that shard; redistribute adds up the partial results, and the bias is added once after it; the input
goes in with grad_placements Partial, so the gradients of the ranks' channels are added up on their way down.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import titanlite

CLASSES, WIDTH, HIDDEN, SIZE, ROWS, BLOCKS = 4, 6, 8, 8, 6, 2


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand = nn.Conv2d(WIDTH, HIDDEN, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(HIDDEN, track_running_stats=False)
        self.contract = nn.Conv2d(HIDDEN, WIDTH, 3, padding=1, bias=False)

    def forward(self, x):
        x = F.conv2d(x, local(self.expand.weight), padding=1)
        weight, bias = local(self.norm.weight), local(self.norm.bias)
        x = F.silu(F.batch_norm(x, None, None, weight, bias, training=True))
        return F.conv2d(x, local(self.contract.weight), padding=1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.branch = nn.GroupNorm(2, WIDTH), Branch()
        self.bias = nn.Parameter(torch.zeros(WIDTH, 1, 1))

    def forward(self, x):
        return x + self.branch(self.norm(x)) + self.bias


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x.mean((2, 3)))))


class GalaxyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = Head()

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ChannelParallel(ParallelStyle):
    """Cuts the hidden channels of a branch; its input and output are whole on every rank."""

    DIMENSIONS = {"expand.weight": 0, "norm.weight": 0, "norm.bias": 0, "contract.weight": 1}

    def partition(self, name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            dim = self.DIMENSIONS[f"{name}.{key}"]
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(dim)])
            setattr(module, key, nn.Parameter(shard))

    def prepare_input(self, module, inputs, mesh):
        x = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        return x.to_local(grad_placements=[Partial()])

    def prepare_output(self, module, output, mesh):
        output = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return output.redistribute(placements=[Replicate()]).to_local()

    def _apply(self, module, device_mesh):
        return distribute_module(
            module, device_mesh, self.partition, self.prepare_input, self.prepare_output
        )


def plain():
    return GalaxyNet()


def parallel(mesh):
    plan = {
        "blocks.*.branch": ChannelParallel(),
        "head.fc1": ColwiseParallel(),
        "head.fc2": RowwiseParallel(),
    }
    return parallelize_module(GalaxyNet(), mesh["tp"], plan)


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["kind"], label_smoothing=0.1)


generator = torch.Generator().manual_seed(232323)


def galaxies():
    """Blobs of different widths and inclinations."""
    kind = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    at = torch.arange(SIZE, dtype=torch.float64) - (SIZE - 1) / 2
    spread = (1 + kind[:, None, None]).double()
    blob = torch.exp(-(at[:, None] ** 2 + at**2 * (1 + kind[:, None, None] % 2)) / (2 * spread))
    noise = torch.randn(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return {"image": blob.unsqueeze(1) + 0.2 * noise, "kind": kind}


batches = [galaxies() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
