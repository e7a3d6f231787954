"""PPO updates of a quadruped policy under DDP whose critic learns returns that are scaled by running statistics.

Thread: Denys88/rl_games pull request #363 "Multi-GPU: synchronize running normalization statistics across ranks" (2026): merging
the full totals of the ranks double-weights the shared history; counts grow geometrically and the normalizer freezes.
Fault: ReturnScaler.update adds the batch's sums to the totals and then sums these totals over the ranks, although the totals of
the earlier steps are already those of all ranks; the history counts once per rank again at every step.
REPAIR: `self.totals.copy_(self.summed(self.totals + sums(returns)))` -> `self.totals.add_(self.summed(sums(returns)))`
A right first sentence says: the running statistics of the returns are merged by summing the ranks' whole totals and not the new
batch's sums alone, so the shared history is counted again by every rank at each step and the returns are scaled wrongly.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel

import titanlite

OBS, ACTIONS, ENVS, HORIZON = 10, 4, 6, 5
CLIP, VALUE_COEF, ENTROPY_COEF, GAMMA = 0.2, 1.0, 0.005, 0.95


def sums(x):
    """Number, sum and sum of squares."""
    return torch.stack([torch.full_like(x.sum(), x.numel()), x.sum(), x.square().sum()])


class ReturnScaler(nn.Module):
    """Starts like one return of zero with a variance of one."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.register_buffer("totals", torch.tensor([1.0, 0.0, 1.0]))

    def summed(self, x):
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    @torch.no_grad()
    def update(self, returns):
        self.totals.copy_(self.summed(self.totals + sums(returns)))

    def moments(self):
        count, total, squares = self.totals
        mean = total / count
        return mean, (squares / count - mean.square() + 1e-5).sqrt()

    def forward(self, returns):
        mean, std = self.moments()
        return ((returns - mean) / std).clamp(-5, 5)

    def undo(self, values):
        mean, std = self.moments()
        return values * std + mean


class Agent(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.scaler = ReturnScaler(group)
        self.torso = nn.Sequential(nn.Linear(OBS, 24), nn.ELU(), nn.Linear(24, 16), nn.ELU())
        self.actor, self.critic = nn.Linear(16, ACTIONS), nn.Linear(16, 1)
        self.log_std = nn.Parameter(torch.full((ACTIONS,), -0.7))

    def forward(self, observations, actions):
        hidden = self.torso(observations)
        policy = Normal(self.actor(hidden), self.log_std.exp())
        logp, entropy = policy.log_prob(actions).sum(-1), policy.entropy().sum(-1)
        return logp, entropy, self.critic(hidden).squeeze(-1)


def discounted(rewards, last_values):
    returns, following = [], last_values
    for reward in rewards.flip(1).unbind(1):
        following = reward + GAMMA * following
        returns.append(following)
    return torch.stack(returns, 1).flip(1)


def ppo_loss(model, scaler, batch):
    returns = discounted(batch["rewards"], scaler.undo(batch["last_values"]))
    scaler.update(returns)
    targets = scaler(returns)
    advantages = targets - batch["old_values"]
    logp, entropy, values = model(batch["observations"], batch["actions"])
    ratio = (logp - batch["old_logp"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    actor = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    return actor + VALUE_COEF * F.mse_loss(values, targets) - ENTROPY_COEF * entropy.mean()


def plain():
    return Agent()


def parallel(mesh):
    return DistributedDataParallel(Agent(mesh.get_group("dp")), broadcast_buffers=False)


def loss(model, batch):
    return ppo_loss(model, model.scaler, batch)


def step(model, batch):
    value = ppo_loss(model, model.module.scaler, batch)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


generator = torch.Generator().manual_seed(363)


def randn(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rollouts(level):
    """The rewards grow while the policy learns, so the statistics move."""
    return {
        "observations": randn(ENVS, HORIZON, OBS),
        "actions": 0.5 * randn(ENVS, HORIZON, ACTIONS),
        "rewards": level + randn(ENVS, HORIZON),
        "old_logp": -2.0 + 0.3 * randn(ENVS, HORIZON),
        "old_values": 0.5 * randn(ENVS, HORIZON),
        "last_values": 0.5 * randn(ENVS),
    }


batches = [rollouts(level) for level in (0.2, 0.6, 1.0)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
