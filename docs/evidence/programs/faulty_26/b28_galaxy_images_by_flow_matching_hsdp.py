"""Flow matching of galaxy images under hybrid sharding; noise and images are paired by optimal transport in the batch.

Thread: atong01/conditional-flow-matching issue #19 "confusing on minibatch optimal transport steps" (2023): "each GPU
inside this function can only see the data on the current node", so that the plan is that of a part of the batch;
asked for is one "on total_batch_size samples when using more than one GPU", with a sync step.
Fault: BatchTransport gathers noise and images over the mesh axis `shard` alone; the batch is split over `replicate`
too, so each replica of two ranks solves a plan of its own half, where one process has a plan of the whole batch.
REPAIR: `BatchTransport(mesh["shard"].get_group())` -> `BatchTransport(mesh._flatten("dp").get_group())`
A right first sentence says: the optimal transport between noise and images is solved within each replica's shard
group instead of over all four data ranks (replicate and shard), so samples get other noise than in one process.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch.distributed.fsdp import fully_shard

import titanlite

SIDE, PATCH, WIDTH, HEADS, ROWS = 8, 4, 16, 2, 16
PATCHES = (SIDE // PATCH) ** 2


class BatchTransport:
    """The noise of a batch in the order that makes the squared distances to the images least."""

    def __init__(self, group=None):
        self.group = group

    def gather(self, x):
        if self.group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts)

    @torch.no_grad()
    def __call__(self, noise, images):
        all_noise, all_images = self.gather(noise), self.gather(images)
        cost = torch.cdist(all_images.flatten(1), all_noise.flatten(1)).square()
        _, plan = linear_sum_assignment(cost.numpy())
        plan = torch.from_numpy(plan)
        if self.group is not None:
            plan = plan.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        return all_noise[plan]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x, time):
        scale1, shift1, scale2, shift2 = self.modulation(time).unsqueeze(1).chunk(4, dim=-1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (
            part.transpose(1, 2) for part in self.qkv(y).unflatten(-1, (3, HEADS, -1)).unbind(2)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x) * (1 + scale2) + shift2)))


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, WIDTH)
        self.places = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.1)
        self.time = nn.Sequential(nn.Linear(4, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PATCH * PATCH)

    def forward(self, images, t):
        x = F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
        waves = [f(k * t) for k in (2, 6) for f in (torch.sin, torch.cos)]
        time = self.time(torch.stack(waves, dim=-1))
        x = self.patches(x) + self.places
        for block in self.blocks:
            x = block(x, time)
        x = self.out(self.norm(x)).transpose(1, 2)
        return F.fold(x, SIDE, PATCH, stride=PATCH)


def flow_matching(model, transport, batch):
    images, t = batch["images"], batch["t"]
    noise = transport(batch["noise"], images)
    s = t.view(-1, 1, 1, 1)
    velocity = model((1 - s) * noise + s * images, t)
    return F.mse_loss(velocity, images - noise)


def plain():
    return Velocity()


def parallel(mesh):
    model = Velocity()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return model, BatchTransport(mesh["shard"].get_group())


def loss(model, batch):
    return flow_matching(model, BatchTransport(), batch)


def step(built, batch):
    value = flow_matching(*built, batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(19)
rows = torch.arange(SIDE, dtype=torch.float64) - (SIDE - 1) / 2


def galaxies():
    size = 1 + 2 * torch.rand(ROWS, 2, 1, generator=generator, dtype=torch.float64)
    profile = torch.exp(-((rows / size) ** 2))
    images = 2 * profile[:, :1].transpose(1, 2) * profile[:, 1:] - 0.5
    noise = torch.randn(ROWS, 1, SIDE, SIDE, generator=generator, dtype=torch.float64)
    t = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return {"images": images.unsqueeze(1), "noise": noise, "t": t}


batches = [galaxies() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"replicate": 0, "shard": 0},
    ranks={"replicate": 2, "shard": 2},
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
