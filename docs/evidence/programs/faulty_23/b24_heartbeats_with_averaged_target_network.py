"""Self-supervised learning on heartbeats (BYOL): an online network, a predictor and an averaged target, with FSDP2.

Thread: pytorch/pytorch issue #131965 "[FSDP2] root module parameters keeps unsharded after forward before backward"
(2024) and pull request #155319 "[FSDP2] keep root unsharded when not specifying reshard_after_forward" (2025): the
root is taken to go backward at once, which a network that only runs forward never does.
Fault: parallel shards the target network without reshard_after_forward; after its first forward pass the root's
parameters stay gathered for ever, and the moving average, which goes on in the shards, never reaches the forward pass.
REPAIR: `fully_shard(model.target, mesh=dp)` -> `fully_shard(model.target, mesh=dp, reshard_after_forward=True)`
A right first sentence says: the target network has no backward pass, so its root FSDP module stays unsharded after
the first forward and keeps its first weights, while the moving average updates the sharded parameters only; targets,
losses and gradients are wrong from the second step on.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

LEADS, SAMPLES, CHANNELS, FEATURES, ROWS, DECAY = 2, 32, 8, 12, 6, 0.8


class ResidualConv(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv1 = nn.Conv1d(channels, channels, 5, padding=2)
        self.conv2 = nn.Conv1d(channels, channels, 5, padding=2)

    def forward(self, x):
        return x + self.conv2(F.silu(self.conv1(self.norm(x))))


class HeartbeatEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(LEADS, CHANNELS, 4, stride=4)
        self.blocks = nn.ModuleList(ResidualConv(CHANNELS) for _ in range(2))
        self.norm = nn.LayerNorm(CHANNELS)
        self.projector = nn.Linear(CHANNELS, FEATURES)

    def forward(self, beats):
        x = self.stem(beats)
        for block in self.blocks:
            x = block(x)
        return self.projector(self.norm(x.mean(-1)))


class HeartbeatBYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = HeartbeatEncoder()
        self.predictor = nn.Sequential(
            nn.Linear(FEATURES, 2 * FEATURES), nn.SiLU(), nn.Linear(2 * FEATURES, FEATURES)
        )
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, view1, view2):
        predicted = self.predictor(self.online(view1))
        with torch.no_grad():
            aimed_at = self.target(view2)
        return 1 - F.cosine_similarity(predicted, aimed_at, dim=-1).mean()


class MovingAverage:
    """Moves the target's parameters towards the online network's before every step."""

    def __init__(self, model):
        self.pairs = list(zip(model.target.parameters(), model.online.parameters()))

    @torch.no_grad()
    def update(self):
        for averaged, current in self.pairs:
            averaged.lerp_(current, 1 - DECAY)


averages = {}


def byol_loss(model, batch):
    if model not in averages:
        averages[model] = MovingAverage(model)
    averages[model].update()
    return 0.5 * (model(batch["view1"], batch["view2"]) + model(batch["view2"], batch["view1"]))


def plain():
    return HeartbeatBYOL()


def parallel(mesh):
    model, dp = HeartbeatBYOL(), mesh["dp"]
    for encoder in (model.online, model.target):
        for block in encoder.blocks:
            fully_shard(block, mesh=dp)
    fully_shard(model.online, mesh=dp)
    fully_shard(model.predictor, mesh=dp)
    fully_shard(model.target, mesh=dp)
    return model, dp


def loss(model, batch):
    return byol_loss(model, batch)


def step(built, batch):
    model, mesh = built
    value = byol_loss(model, batch)
    value.backward()
    reported = value.detach().clone()
    dist.all_reduce(reported, group=mesh.get_group())
    return reported / mesh.size()


generator = torch.Generator().manual_seed(131965)


def augmented(beats):
    gain = 0.7 + 0.6 * torch.rand(ROWS, LEADS, 1, generator=generator, dtype=torch.float64)
    noise = 0.2 * torch.randn(ROWS, LEADS, SAMPLES, generator=generator, dtype=torch.float64)
    return gain * beats + noise


def recordings():
    phase = torch.rand(ROWS, LEADS, 1, generator=generator, dtype=torch.float64)
    rate = 1 + 2 * torch.rand(ROWS, 1, 1, generator=generator, dtype=torch.float64)
    beats = torch.sin(6.3 * (phase + rate * torch.arange(SAMPLES) / SAMPLES)) ** 3
    return {"view1": augmented(beats), "view2": augmented(beats)}


batches = [recordings() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
