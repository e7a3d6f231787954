"""PPO that normalizes advantages on each rank.

Thread: https://github.com/HorizonRobotics/alf/pull/1642 "Improve normalized advantage calculation"
("for DDP training, the normalization statistics will combine the statistics from all GPUs"),
2024-05-07.
Wrong: mean and standard deviation of the advantages are those of the rank's samples.
A right diagnosis says: every module output agrees, the loss does not: the advantages in it are
normalized by the mean and the deviation of the rank's part of the batch, not of the whole.
"""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLIP = 0.2


class ActorCritic(nn.Module):
    def __init__(self, observation=6, actions=4):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observation, 24), nn.Tanh(), nn.Linear(24, actions))
        self.critic = nn.Sequential(nn.Linear(observation, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, observation):
        return self.actor(observation), self.critic(observation)[:, 0]


def normalize_advantages(advantages):
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def ppo_loss(model, batch):
    logits, values = model(batch["observation"])
    policy = Categorical(logits=logits)
    ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
    advantage = normalize_advantages(batch["advantage"])
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
    return policy_loss + 0.5 * mse_loss(values, batch["return"]) - 0.01 * policy.entropy().mean()


def build():
    return DistributedDataParallel(ActorCritic())


generator = torch.Generator().manual_seed(16)
batches = [
    {
        "observation": torch.randn(12, 6, generator=generator),
        "action": torch.randint(4, (12,), generator=generator),
        "log_prob": -1.4 + 0.1 * torch.randn(12, generator=generator),
        "advantage": torch.randn(12, generator=generator).cumsum(0),
        "return": torch.randn(12, generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=ppo_loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(ActorCritic, build, **options))
