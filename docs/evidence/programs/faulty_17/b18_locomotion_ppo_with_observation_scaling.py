"""PPO updates of a locomotion policy that scales its observations by running statistics, environments dealt over the ranks.

Thread: Denys88/rl_games pull request #171 "Deprecate horovod in favor of torch.distributed" (2022), which dropped the syncing of
the running statistics between the workers; ray-project/ray issue #11967 "How does rllib sync torch model buffers in distributed
learning?" (2020): only gradients are reduced, the statistics of the normalization stay with each worker.
Fault: Runner.update feeds the running mean and variance of the observations with the rank's own environments alone; the averaged
gradients come from policies that see differently scaled inputs, and the buffers of the ranks drift apart.
REPAIR: `model.obs_rms.update(moments(observations))` -> `model.obs_rms.update(self.summed(moments(observations)))`
A right first sentence says: each rank updates the running observation statistics from its own environments only, so every rank
normalizes its inputs differently and neither as one process would with the statistics of all environments.
"""

import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

import titanlite

OBS, ACTIONS, ENVS, HORIZON = 9, 3, 8, 4
CLIP, VALUE_COEF, ENTROPY_COEF = 0.2, 0.5, 0.01


def moments(x):
    """Count, sum and sum of squares of each feature."""
    x = x.reshape(-1, x.size(-1))
    return torch.stack([torch.full_like(x[0], len(x)), x.sum(0), x.square().sum(0)])


class RunningMeanStd(nn.Module):
    def __init__(self, size, epsilon=1e-4):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.full((), epsilon))

    @torch.no_grad()
    def update(self, stats):
        count, total, squares = stats[0, 0], stats[1], stats[2]
        batch_mean = total / count
        batch_var = squares / count - batch_mean.square()
        delta, both = batch_mean - self.mean, self.count + count
        m2 = self.var * self.count + batch_var * count
        m2 = m2 + delta.square() * self.count * count / both
        self.mean += delta * count / both
        self.var.copy_(m2 / both)
        self.count.copy_(both)

    def forward(self, x):
        return ((x - self.mean) * (self.var + 1e-5).rsqrt()).clamp(-5, 5)


def mlp(*sizes):
    layers = []
    for i, o in itertools.pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ELU()]
    return nn.Sequential(*layers[:-1])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.obs_rms = RunningMeanStd(OBS)
        self.actor, self.critic = mlp(OBS, 24, 16, ACTIONS), mlp(OBS, 24, 16, 1)
        self.log_std = nn.Parameter(torch.full((ACTIONS,), -0.5))

    def forward(self, observations):
        x = self.obs_rms(observations)
        return Normal(self.actor(x), self.log_std.exp()), self.critic(x).squeeze(-1)


def ppo_loss(model, batch):
    policy, values = model(batch["observations"])
    logp = policy.log_prob(batch["actions"]).sum(-1)
    ratio = (logp - batch["old_logp"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    advantages = batch["advantages"]
    actor = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    critic = F.smooth_l1_loss(values, batch["returns"])
    return actor + VALUE_COEF * critic - ENTROPY_COEF * policy.entropy().sum(-1).mean()


class Runner:
    """One update from the rollouts of this rank's environments; the gradients travel in one flat tensor."""

    def __init__(self, model):
        self.model = model
        self.world = dist.get_world_size()

    def summed(self, tensor):
        dist.all_reduce(tensor)
        return tensor

    def reduce_parameters(self):
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        flat = self.summed(torch.cat([p.grad.reshape(-1) for p in parameters])) / self.world
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))

    def update(self, batch):
        model, observations = self.model, batch["observations"]
        model.obs_rms.update(moments(observations))
        value = ppo_loss(model, batch)
        value.backward()
        self.reduce_parameters()
        return self.summed(value.detach().clone()) / self.world


def plain():
    return ActorCritic()


def parallel(mesh):
    model = ActorCritic()
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    return model, Runner(model)


def loss(model, batch):
    model.obs_rms.update(moments(batch["observations"]))
    return ppo_loss(model, batch)


def step(built, batch):
    return built[1].update(batch)


generator = torch.Generator().manual_seed(171)


def randn(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


scales, terrain = randn(OBS).exp(), randn(ENVS, 1, OBS)


def rollouts():
    """First the environments, then the time; the environments stand on different terrains."""
    return {
        "observations": (randn(ENVS, HORIZON, OBS) + terrain) * scales,
        "actions": randn(ENVS, HORIZON, ACTIONS) * 0.6,
        "old_logp": -2.5 + 0.4 * randn(ENVS, HORIZON),
        "advantages": randn(ENVS, HORIZON),
        "returns": 1 + randn(ENVS, HORIZON),
    }


batches = [rollouts() for _ in range(4)]

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
