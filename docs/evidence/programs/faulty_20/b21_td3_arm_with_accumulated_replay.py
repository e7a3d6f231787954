"""Twin critics and an actor for a robot arm (TD3) under DDP; a replay batch goes through in several micro-batches.

Thread: NVIDIA/TorchFort pull request #103 "RL: first round of some fixes and improvements" (2026): in DDPG and SAC the Polyak
update of the targets wasn't tied to the optimizer's steps when gradients are accumulated.
Fault: step calls TD3.follow inside its loop over the micro-batches, so the target networks move towards the trained ones three
times per optimizer step and not once.
REPAIR: `model.module.follow()` -> `model.module.follow() if index == 0 else None`
A right first sentence says: the Polyak average of the target networks is taken once per micro-batch instead of once per
optimizer step, so with gradient accumulation the targets run ahead; they and then the critics' gradients are off from step 2 on.
"""

from contextlib import nullcontext
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import titanlite

OBS, ACTIONS, HIDDEN, REPLAY, MICROBATCHES = 8, 3, 16, 12, 3
GAMMA, TAU, NOISE_CLIP = 0.95, 0.1, 0.3


class Actor(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(OBS, HIDDEN),
            nn.SiLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.SiLU(),
            nn.Linear(HIDDEN, ACTIONS),
            nn.Tanh(),
        )


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.middle = nn.Linear(OBS + ACTIONS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, 1)

    def forward(self, observation, action):
        x = F.silu(self.input(torch.cat([observation, action], dim=-1)))
        return self.value(F.silu(self.middle(x))).squeeze(-1)


class TD3(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.ModuleDict({"actor": Actor(), "q1": Critic(), "q2": Critic()})
        self.target = deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, TAU)

    @torch.no_grad()
    def bootstrap(self, batch):
        noise = batch["noise"].clamp(-NOISE_CLIP, NOISE_CLIP)
        action = (self.target["actor"](batch["next"]) + noise).clamp(-1, 1)
        q1, q2 = (self.target[name](batch["next"], action) for name in ("q1", "q2"))
        return batch["reward"] + GAMMA * (1 - batch["done"]) * torch.minimum(q1, q2)

    def forward(self, batch):
        target = self.bootstrap(batch)
        observation, action = batch["observation"], batch["action"]
        values = [self.online[name](observation, action) for name in ("q1", "q2")]
        critics = sum(F.smooth_l1_loss(value, target) for value in values)
        frozen = {name: p.detach() for name, p in self.online["q1"].named_parameters()}
        chosen = self.online["actor"](observation)
        return critics - functional_call(self.online["q1"], frozen, (observation, chosen)).mean()


def plain():
    return TD3()


def parallel(mesh):
    return DistributedDataParallel(TD3())


def loss(model, batch):
    model.follow()
    return model(batch)


def micro_batches(batch):
    parts = {key: value.chunk(MICROBATCHES) for key, value in batch.items()}
    return [{key: part[i] for key, part in parts.items()} for i in range(MICROBATCHES)]


def step(model, batch):
    total = torch.zeros(())
    for index, part in enumerate(micro_batches(batch)):
        last = index == MICROBATCHES - 1
        with nullcontext() if last else model.no_sync():
            model.module.follow()
            value = model(part) / MICROBATCHES
            value.backward()
        total += value.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


generator = torch.Generator().manual_seed(103)


def randn(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def transitions():
    return {
        "observation": randn(REPLAY, OBS),
        "action": randn(REPLAY, ACTIONS).tanh(),
        "next": randn(REPLAY, OBS),
        "noise": 0.2 * randn(REPLAY, ACTIONS),
        "reward": randn(REPLAY),
        "done": (torch.rand(REPLAY, generator=generator, dtype=torch.float64) < 0.2).double(),
    }


batches = [transitions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
