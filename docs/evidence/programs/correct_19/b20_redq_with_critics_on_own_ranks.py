"""REDQ, an actor-critic method with many critics: each rank keeps two of four critics, and all ranks read the same transitions.

Might be accused because: the critics' gradients are not reduced at all, those of the actor and of the temperature are summed
and not averaged; the policy's entropy and the temperature's loss are divided by the number of ranks; the targets of a rank
come from the critics of all ranks; the actor's gradient on a rank comes from this rank's critics alone before the sum.
Correct because: the critics are stacked along the first dimension of their weights and cut there, so a critic's gradient is
whole on its rank. The actor's loss is a mean over the critics: each rank adds its critics' part of it and its share of the
terms that all ranks compute alike, and the parts add up. The minimum of the target critics needs no gradient.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

OBS, ACTIONS, WIDTH, CRITICS, ROWS = 6, 2, 16, 4, 10
GAMMA, TAU, TARGET_ENTROPY = 0.97, 0.1, -float(ACTIONS)


class Stacked(nn.Module):
    """As many linear layers side by side as there are critics on this rank."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CRITICS, inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(CRITICS, 1, outputs))

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = OBS + ACTIONS, WIDTH, WIDTH, 1
        self.first, self.second, self.last = map(Stacked, sizes[:-1], sizes[1:])

    def forward(self, observations, actions):
        x = torch.cat([observations, actions], dim=-1).expand(len(self.last.bias), -1, -1)
        x = F.silu(self.second(F.silu(self.first(x))))
        return self.last(x).squeeze(-1)


class Actor(nn.Module):
    """A squashed Gaussian; the noise comes from outside."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.mean, self.log_std = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, ACTIONS)

    def forward(self, observations, noise):
        x = F.silu(self.body(observations))
        log_std = self.log_std(x).clamp(-4, 1)
        raw = self.mean(x) + log_std.exp() * noise
        logp = (-0.5 * noise.square() - log_std - 0.919).sum(-1)
        logp = logp - (2 * (0.6931 - raw - F.softplus(-2 * raw))).sum(-1)
        return raw.tanh(), logp


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critics, self.targets = Actor(), Critics(), Critics()
        self.targets.load_state_dict(self.critics.state_dict())
        self.targets.requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    @torch.no_grad()
    def follow(self):
        for target, critic in zip(self.targets.parameters(), self.critics.parameters()):
            target.lerp_(critic, TAU)


class Ranks:
    size = 1

    def smallest(self, x):
        return x


class CriticRanks(Ranks):
    def __init__(self, group):
        self.group, self.size = group, dist.get_world_size(group)

    def smallest(self, x):
        dist.all_reduce(x, op=dist.ReduceOp.MIN, group=self.group)
        return x

    def cut(self, critics):
        for layer in (critics.first, critics.second, critics.last):
            for name, parameter in list(layer.named_parameters()):
                part = parameter.detach().chunk(self.size)[dist.get_rank(self.group)].clone()
                setattr(layer, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def redq_loss(agent, ranks, batch):
    observations, actions, rewards, following, done, noise, following_noise = batch
    agent.follow()
    alpha = agent.log_alpha.exp()
    with torch.no_grad():
        next_actions, next_logp = agent.actor(following, following_noise)
        lowest = ranks.smallest(agent.targets(following, next_actions).amin(0))
        goal = rewards + GAMMA * (1 - done) * (lowest - alpha * next_logp)
    errors = agent.critics(observations, actions) - goal
    critic_loss = errors.square().mean(1).sum() / CRITICS

    new_actions, logp = agent.actor(observations, noise)
    agent.critics.requires_grad_(False)
    value = agent.critics(observations, new_actions).mean(1).sum() / CRITICS
    agent.critics.requires_grad_(True)
    entropy_loss = (alpha.detach() * logp).mean()
    alpha_loss = -alpha * (logp.detach().mean() + TARGET_ENTROPY)
    return critic_loss - value + (entropy_loss + alpha_loss) / ranks.size


def plain():
    return Agent()


def parallel(mesh):
    agent, ranks = Agent(), CriticRanks(mesh.get_group("critics"))
    ranks.cut(agent.critics)
    ranks.cut(agent.targets)
    return agent, ranks


def loss(agent, batch):
    return redq_loss(agent, Ranks(), batch)


def step(built, batch):
    agent, ranks = built
    value = redq_loss(agent, ranks, batch)
    value.backward()
    value = value.detach().clone()
    shared = [agent.log_alpha, *agent.actor.parameters()]
    for tensor in (value, *(p.grad for p in shared)):
        dist.all_reduce(tensor, group=ranks.group)
    return value


generator = torch.Generator().manual_seed(22)


def transitions():
    def randn(*shape):
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)

    state, noise, done = randn(OBS), randn(2, ACTIONS), (randn() > 0.8).double()
    following = state + 0.2 * randn(OBS)
    return state, randn(ACTIONS).tanh(), randn(), following, done, noise[:, 0], noise[:, 1]


batches = [transitions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"critics": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
