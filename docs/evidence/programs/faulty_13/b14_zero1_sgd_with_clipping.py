"""DDP with a ZeRO stage 1 optimizer written by hand: every rank updates its rows of each parameter, after clipping.

Thread: pytorch/xla pull request #4796 "Minor fix: ZeRO-1 grad clipping" (2023): the optimizer of #4648 clipped the gradient
shards by the norm of the local shards; the norm has to be reduced over the shards.
Fault: in ZeroRedundancyOptimizer._clip_grad_norm, the norm is that of this rank's shards only. It is smaller than the norm of
the whole gradient and another one on each rank, so every rank scales its rows by a coefficient of its own and clips too little.
REPAIR: `total_norm = torch.linalg.vector_norm(torch.stack(norms))` ->
`total_norm = torch.linalg.vector_norm(torch.stack(norms)).square(); dist.all_reduce(total_norm); total_norm = total_norm.sqrt()`
A right first sentence says: the ZeRO optimizer clips by the norm of the local gradient shards, which _clip_grad_norm does not
reduce over the ranks, so weights are updated with too large gradients, scaled differently on each rank's rows.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, WIDTH, CLASSES = 10, 18, 5
MAX_NORM = 0.5
HYPER = dict(lr=0.2, momentum=0.9)


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.Sequential(ResidualBlock(), ResidualBlock())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer of shards: dimension 0 of every parameter is padded and cut over the ranks."""

    def __init__(self, params, optimizer_class, max_norm=None, **defaults):
        super().__init__(params, defaults)
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.max_norm = max_norm
        self.shards = []
        for group in self.param_groups:
            for p in group["params"]:
                self.shards.append((p, nn.Parameter(self._shard_tensor(p.detach()).clone())))
        self.base_optimizer = optimizer_class([shard for _, shard in self.shards], **defaults)

    def _shard_tensor(self, tensor):
        missing = -len(tensor) % self.world_size
        if missing:
            tensor = F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing])
        return tensor.chunk(self.world_size)[self.rank]

    def _reduce_gradients(self):
        for p, shard in self.shards:
            shard.grad = None if p.grad is None else self._shard_tensor(p.grad).clone()

    def _clip_grad_norm(self):
        grads = [shard.grad for _, shard in self.shards if shard.grad is not None]
        norms = [torch.linalg.vector_norm(grad) for grad in grads]
        total_norm = torch.linalg.vector_norm(torch.stack(norms))
        clip_coef = torch.clamp(self.max_norm / (total_norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(clip_coef)

    def _update_parameters(self):
        for p, shard in self.shards:
            whole = shard.new_empty(len(shard) * self.world_size, *shard.shape[1:])
            dist.all_gather(list(whole.chunk(self.world_size)), shard.detach())
            p.copy_(whole[: len(p)])

    @torch.no_grad()
    def step(self, closure=None):
        self._reduce_gradients()
        if self.max_norm is not None:
            self._clip_grad_norm()
        self.base_optimizer.step()
        self._update_parameters()


class ClippedSGD(torch.optim.SGD):
    """What the sharded optimizer stands for, on one process."""

    @torch.no_grad()
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(
            [p for group in self.param_groups for p in group["params"]], MAX_NORM
        )
        super().step()


def plain_optimizer(params):
    return ClippedSGD(params, **HYPER)


def parallel():
    model = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, max_norm=MAX_NORM, **HYPER
    )
    return model, optimizer


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(17)
    for _ in range(count):
        x = 2 * torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
        yield {"x": x, "y": torch.randint(CLASSES, (rows,), generator=generator)}


arguments = Model, parallel
options = dict(
    batches=list(make_batches(4, rows=12)),
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 4},
    optimizer=plain_optimizer,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
