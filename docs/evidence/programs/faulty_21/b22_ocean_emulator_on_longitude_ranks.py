"""An ocean emulator of convolutions: samples over the "dp" ranks, and the longitudes of the globe over the "w" ranks, with halos.

Thread: ai2cm/ace pull request #995 "Add spatial parallel regression tests and fix differentiable reduce" (2026): the ranks that
share a sample in space didn't aggregate the gradients of the parameters, so each of them applied an update of its own.
Fault: parallel gives DDP the group of the "dp" axis alone; nothing reduces the gradients over "w", although each of these ranks
has the gradient of its own longitudes only, so the copies of the weights drift apart between the "w" ranks.
REPAIR: `return DistributedDataParallel(model, process_group=mesh.get_group("dp"))` -> `return DistributedDataParallel(model)`
A right first sentence says: the gradients are averaged over dp only and never reduced over the spatial axis w, so each longitude
rank keeps the gradient of its own part of the globe and the weights differ between the w ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

FIELDS, LAT, LON, WIDTH, DEPTH, ROWS = 3, 6, 12, 8, 2, 4


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def neighbours(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return (rank - 1) % size, (rank + 1) % size


class RoundTheGlobe(torch.autograd.Function):
    """Adds the nearest column of the western and of the eastern neighbour."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        edges = gathered(torch.stack([x[..., :1], x[..., -1:]]), group)
        west, east = neighbours(group)
        return torch.cat([edges[west][1], x, edges[east][0]], dim=-1)

    @staticmethod
    def backward(ctx, grad):
        outer = gathered(torch.stack([grad[..., :1], grad[..., -1:]]), ctx.group)
        west, east = neighbours(ctx.group)
        grad = grad[..., 1:-1].clone()
        grad[..., :1] += outer[west][1]
        grad[..., -1:] += outer[east][0]
        return grad, None


class GlobeConv(nn.Conv2d):
    """3 x 3, periodic in longitude; the poles repeat their own row."""

    group = None

    def forward(self, x):
        if self.group is None:
            x = F.pad(x, (1, 1, 0, 0), mode="circular")
        else:
            x = RoundTheGlobe.apply(x, self.group)
        return super().forward(F.pad(x, (0, 0, 1, 1), mode="replicate"))


class PointNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.spatial = PointNorm(WIDTH), GlobeConv(WIDTH, WIDTH, 3)
        self.up, self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 1), nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.spatial(self.norm(x)))))


class Emulator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = GlobeConv(FIELDS, WIDTH, 3)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.decode = nn.Conv2d(WIDTH, FIELDS, 1)

    def forward(self, x):
        return x + self.decode(self.blocks(self.encode(x)))


def plain():
    return Emulator()


def parallel(mesh):
    model = Emulator()
    for module in model.modules():
        if isinstance(module, GlobeConv):
            module.group = mesh.get_group("w")
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def loss(model, batch):
    """Mean over samples and points, with the area of each latitude; two steps are rolled out."""
    state, total = batch["state"], 0.0
    for target in (batch["one_day"], batch["two_days"]):
        state = model(state)
        total = total + ((state - target).square() * batch["area"]).mean()
    return total / 2


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


generator = torch.Generator().manual_seed(995)
angles = (torch.arange(LAT, dtype=torch.float64) + 0.5) / LAT * torch.pi
area = (angles.sin() / angles.sin().mean())[None, None, :, None].expand(ROWS, 1, LAT, LON)


def days():
    state = torch.randn(ROWS, FIELDS, LAT, LON, generator=generator, dtype=torch.float64)
    state = (state + state.roll(1, 3) + state.roll(-1, 3)) / 2
    one_day, two_days = 0.9 * state.roll(1, 3), 0.8 * state.roll(2, 3)
    return {"state": state, "one_day": one_day, "two_days": two_days, "area": area.clone()}


batches = [days() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"dp": 0, "w": 3},
    ranks={"dp": 2, "w": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
