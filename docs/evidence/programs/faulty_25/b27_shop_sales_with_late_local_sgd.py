"""A forecast of shop sales on two nodes of two ranks, with post-local SGD after a warm-up and gradient accumulation.

Thread: pytorch/pytorch pull requests #61207 "[Model Averaging] Skip model averaging for the first K steps" (2021) and
#73285 (2022, "warmup_steps must be the same as start_localSGD_iter", and what happens silently if they aren't);
ORNL/HydraGNN pull request #538 (2026) has to say that "both intervals count optimizer steps".
Fault: PostLocalSGDState counts the reductions of the hook, two per optimizer step as there are two micro-batches
without no_sync, while the averager counts optimizer steps: from step 3 of 4 warm-up steps on, gradients are averaged
within a node only, and no averager makes up for it.
REPAIR: `start_localSGD_iter=WARMUP_STEPS` -> `start_localSGD_iter=WARMUP_STEPS * ACCUMULATION`
A right first sentence says: from step 3 on the gradients of all parameters are averaged over the ranks of a node but
not over the nodes, since the hook's start_localSGD_iter counts backward passes (micro-batches), not optimizer steps.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

SHOPS, WEEKS, HORIZON, WIDTH, ROWS = 12, 16, 4, 14, 16
WARMUP_STEPS, PERIOD, ACCUMULATION = 4, 4, 2
QUANTILES = (0.1, 0.5, 0.9)


class CausalConv(nn.Module):
    def __init__(self, inputs, outputs, dilation):
        super().__init__()
        self.padding = dilation
        self.conv = nn.Conv1d(inputs, outputs, 2, dilation=dilation)

    def forward(self, x):
        return self.conv(F.pad(x, (self.padding, 0)))


class ResidualBlock(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.conv1 = CausalConv(WIDTH, WIDTH, dilation)
        self.conv2 = CausalConv(WIDTH, WIDTH, dilation)
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x):
        return x + self.conv2(F.relu(self.norm(self.conv1(x))))


class SalesForecast(nn.Module):
    """Quantiles of the next weeks from the past weeks of one shop."""

    def __init__(self):
        super().__init__()
        self.shop = nn.Embedding(SHOPS, WIDTH)
        self.enter = nn.Conv1d(2, WIDTH, 1)
        self.blocks = nn.ModuleList(ResidualBlock(2**i) for i in range(3))
        self.quantiles = nn.Linear(WIDTH, HORIZON * len(QUANTILES))

    def forward(self, past, shop):
        x = self.enter(past) + self.shop(shop).unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return self.quantiles(x[..., -1]).unflatten(-1, (HORIZON, len(QUANTILES)))


def pinball(forecast, future):
    levels = torch.tensor(QUANTILES, dtype=forecast.dtype)
    error = future.unsqueeze(-1) - forecast
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def plain():
    return SalesForecast()


def parallel(mesh):
    model = DDP(SalesForecast())
    state = PostLocalSGDState(
        process_group=None, subgroup=mesh.get_group("gpu"), start_localSGD_iter=WARMUP_STEPS
    )
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=WARMUP_STEPS)
    optimizer = PostLocalSGDOptimizer(make_optimizer(model.parameters()), averager)
    return model, optimizer


def loss(model, batch):
    return pinball(model(batch["past"], batch["shop"]), batch["future"])


def step(built, batch):
    model, _ = built
    parts = zip(*(batch[key].chunk(ACCUMULATION) for key in ("past", "shop", "future")))
    total = 0.0
    for past, shop, future in parts:
        value = pinball(model(past, shop), future) / ACCUMULATION
        value.backward()
        total = total + value.detach()
    return total


generator = torch.Generator().manual_seed(61207)


def weeks():
    shop = torch.randint(0, SHOPS, (ROWS,), generator=generator)
    phase = torch.rand(ROWS, 1, generator=generator) * 6.3
    time = torch.arange(WEEKS + HORIZON, dtype=torch.float64)
    noise = torch.randn(ROWS, WEEKS + HORIZON, generator=generator, dtype=torch.float64)
    sales = (0.1 * shop).unsqueeze(1) + torch.sin(0.8 * time + phase) + 0.2 * noise
    season = torch.cos(0.4 * time).expand(ROWS, -1)
    past = torch.stack([sales, season], 1)[..., :WEEKS]
    return {"past": past, "shop": shop, "future": sales[:, WEEKS:]}


batches = [weeks() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"node": 0, "gpu": 0},
    ranks={"node": 2, "gpu": 2},
    optimizer=make_optimizer,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
