"""A driver-behaviour mixer under DDP with Shampoo, whose blocks are dealt to the ranks and gathered in one buffer.

Thread: facebookresearch/optimizers, file distributed_shampoo/distributor/shampoo_ddp_distributor.py: each rank finds
the search directions of its own blocks, all_gather_into_tensor brings them to all.
Correct: a block of a matrix needs nothing of the other blocks, so it doesn't matter who works on it; only its owner has
its states. The owner's results are written into views of its row of the buffer, the rows are gathered in place (a row
is padded to the longest), and every rank adds the same numbers to its blocks, which are views of the parameters. Blocks
are dealt by size and then number, which is the same on all ranks. In one process the single row is the whole.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SENSORS, LENGTH, WIDTH, CLASSES, ROWS, BLOCK = 5, 8, 20, 4, 12, 12


def blocks_of(tensor):
    """Views of at most BLOCK x BLOCK numbers; vectors are one column."""
    matrix = tensor.view(len(tensor), -1) if tensor.dim() > 1 else tensor.view(-1, 1)
    return [block for rows in matrix.split(BLOCK) for block in rows.split(BLOCK, 1)]


def inverse_root(matrix, power, eps):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * (values.clamp(min=0) + eps) ** (-1 / power) @ vectors.T


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, beta=0.9, eps=1e-4, weight_decay=0.01, group=None):
        super().__init__(params, dict(lr=lr, beta=beta, eps=eps, weight_decay=weight_decay))
        self.process_group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.distribute()

    def distribute(self):
        params = [p for options in self.param_groups for p in options["params"]]
        sizes = [block.numel() for p in params for block in blocks_of(p.detach())]
        loads, self.owners = [0] * self.ranks, {}
        for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            owner = min(range(self.ranks), key=loads.__getitem__)
            self.owners[number] = owner, loads[owner]
            loads[owner] += sizes[number]
        self.buffer = torch.zeros(self.ranks, max(loads), dtype=params[0].dtype)
        self.factors = {}

    def direction(self, number, grad, options):
        if number not in self.factors:
            self.factors[number] = [torch.zeros(n, n) for n in grad.shape], torch.zeros_like(grad)
        (left, right), momentum = self.factors[number]
        left.addmm_(grad, grad.T)
        right.addmm_(grad.T, grad)
        found = inverse_root(left, 4, options["eps"]) @ grad
        found = found @ inverse_root(right, 4, options["eps"])
        found *= grad.norm() / found.norm().clamp(min=1e-12)
        return momentum.mul_(options["beta"]).add_(found)

    @torch.no_grad()
    def step(self, closure=None):
        todo, number = [], 0
        for options in self.param_groups:
            for p in options["params"]:
                for block, grad in zip(blocks_of(p), blocks_of(p.grad)):
                    owner, offset = self.owners[number]
                    view = self.buffer[owner, offset : offset + block.numel()].view(block.shape)
                    if owner == self.rank:
                        view.copy_(self.direction(number, grad, options))
                    todo.append((block, view, options))
                    number += 1
        if self.process_group is not None:
            own = self.buffer[self.rank]
            dist.all_gather_into_tensor(self.buffer.view(-1), own, group=self.process_group)
        for block, view, options in todo:
            block.mul_(1 - options["lr"] * options["weight_decay"]).add_(view, alpha=-options["lr"])


class MixerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.times, self.features = nn.Linear(LENGTH, LENGTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + F.gelu(self.times(self.norm1(x).transpose(1, 2))).transpose(1, 2)
        return x + F.gelu(self.features(self.norm2(x)))


class DriverMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(SENSORS, WIDTH)
        self.layers = nn.Sequential(MixerLayer(), MixerLayer())
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.leave(self.layers(self.enter(x)).mean(1))


def plain():
    return DriverMixer()


def parallel(mesh):
    group = mesh.get_group()
    model = DistributedDataParallel(
        DriverMixer(), process_group=group, gradient_as_bucket_view=True, static_graph=True
    )
    return model, Shampoo(model.parameters(), group=group)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


generator = torch.Generator().manual_seed(1802)


def drives():
    signals = torch.randn(ROWS, LENGTH, SENSORS, generator=generator, dtype=torch.float64)
    return signals, torch.randint(0, CLASSES, (ROWS,), generator=generator)


batches = [drives() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, split="dp", ranks={"dp": 4}, optimizer=Shampoo)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
