"""A small image diffusion transformer under FSDP2 with accumulated micro-batches and a learning rate of warm-up and cosine.

Thread: h2oai/h2o-llmstudio issue #663 "Scheduler should consider gradient accumulation while assigning epoch_steps?" (2024): the
schedule's length is counted in batches of the loader, while the optimizer steps once per several of them. The same question in
IndicoDataSolutions/finetune issue #380 "lr decay with gradient accumulation" (2019).
Fault: parallel gives the schedule the number of micro-batches as its length, but the scheduler advances once per optimizer step; the
warm-up takes twice as long, and the training ends in the middle of the cosine.
REPAIR: `total_steps = MicroBatches.number(batches)` -> `total_steps = MicroBatches.number(batches) // ACCUMULATION`
A right first sentence says: the learning rate schedule is laid out over the number of micro-batches instead of optimizer steps, so
its warm-up and decay are too slow and the weights get other updates from equal gradients.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

CHANNELS, SIZE, PATCH, WIDTH, HEADS, CLASSES = 3, 8, 2, 16, 2, 4
ACCUMULATION, EPOCHS, WARMUP = 2, 1, 0.25


def embed_timesteps(t, width=WIDTH):
    frequencies = torch.exp(-math.log(1000.0) * torch.arange(width // 2) / (width // 2))
    angles = 1000 * t[:, None] * frequencies.to(t)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        )
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.1)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))
        self.out = nn.Linear(WIDTH, CHANNELS * PATCH**2)

    def forward(self, images, t, labels):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(embed_timesteps(t)) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition)
        return F.fold(self.out(x).transpose(1, 2), SIZE, PATCH, stride=PATCH)


def flow_matching_loss(model, batch):
    images, noise, t, labels = batch
    mixed = torch.lerp(images, noise, t[:, None, None, None])
    return F.mse_loss(model(mixed, t, labels), noise - images)


def make_optimizer(parameters, total_steps):
    """AdamW; its learning rate follows a cosine after a warm-up, and moves on after each step."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, int(WARMUP * total_steps))

    def factor(number):
        if number < warmup:
            return (number + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (number - warmup) / max(1, total_steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class MicroBatches:
    """What a rank's loader hands out for one batch."""

    def __init__(self, batch):
        self.parts = list(zip(*(tensor.chunk(ACCUMULATION) for tensor in batch)))

    @staticmethod
    def number(loader):
        return EPOCHS * sum(len(MicroBatches(batch).parts) for batch in loader)

    def __iter__(self):
        for index, part in enumerate(self.parts):
            yield part, index == len(self.parts) - 1


def plain():
    return DiT()


def parallel(mesh):
    model = DiT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    total_steps = MicroBatches.number(batches)
    return model, make_optimizer(model.parameters(), total_steps)


def loss(model, batch):
    return flow_matching_loss(model, batch)


def step(built, batch):
    model, _ = built
    logged = torch.zeros(())
    for part, last in MicroBatches(batch):
        model.set_requires_gradient_sync(last)
        value = flow_matching_loss(model, part) / ACCUMULATION
        value.backward()
        logged += value.detach()
    dist.all_reduce(logged)
    return logged / dist.get_world_size()


generator = torch.Generator().manual_seed(663)


def images(number=8):
    shape = number, CHANNELS, SIZE, SIZE
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.rand(number, generator=generator, dtype=torch.float64),
        torch.randint(0, CLASSES, (number,), generator=generator),
    )


batches = [images() for _ in range(6)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: make_optimizer(parameters, EPOCHS * len(batches)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
