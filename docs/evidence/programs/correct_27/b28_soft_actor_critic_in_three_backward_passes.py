"""Soft actor-critic for a small arm: critics, actor and temperature have a backward pass each, over unequal replay
shares.

Thread: HorizonRobotics/alf pull request #433 "Sac Algorithm" (2020): three losses of one batch, which one process
adds and where a mean in the wrong place made the curves differ.
Correct: the critics' gradients are on their way while the actor's loss runs through the very critics; but those are
frozen for that pass, nothing touches the flat copy in flight, and it's written back at the end. Both losses with the
critics use the same weights, since no optimizer runs in between. A rank's losses are sums over its rows times its own
1 / all rows, and gradients are summed. The target networks move at the start of a step, on all ranks by the same
critics, so that they need no exchange. The temperature's loss uses the log-probabilities as numbers and is a sum over
rows, like the others.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

import titanlite

STATE, ACTION, WIDTH, ROWS, GAMMA, TAU, LOG2 = 6, 2, 16, 19, 0.97, 0.05, 0.6931471805599453
SHARES = [8, 4, 7]


def mlp(inputs, outputs):
    layers = [nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(STATE + ACTION, 1), mlp(STATE + ACTION, 1)

    def forward(self, state, action):
        pair = torch.cat([state, action], -1)
        return torch.stack([self.first(pair), self.second(pair)]).squeeze(-1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critics = mlp(STATE, 2 * ACTION), Critics()
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def act(self, state, noise):
        mean, log_std = self.actor(state).chunk(2, -1)
        log_std = 2.0 * torch.tanh(log_std) - 1.0
        raw = mean + noise * log_std.exp()
        log_prob = -0.5 * noise.square() - log_std - 2 * (LOG2 - raw - F.softplus(-2 * raw))
        return torch.tanh(raw), log_prob.sum(-1)

    @torch.no_grad()
    def move_targets(self):
        for target, critic in zip(self.targets.parameters(), self.critics.parameters()):
            target.lerp_(critic, TAU)

    def critic_errors(self, batch):
        with torch.no_grad():
            action, log_prob = self.act(batch["next_state"], batch["next_noise"])
            value = self.targets(batch["next_state"], action).amin(0)
            value = value - self.log_alpha.exp() * log_prob
            goal = batch["reward"] + GAMMA * batch["alive"] * value
        return F.smooth_l1_loss(
            self.critics(batch["state"], batch["action"]), goal.expand(2, -1), reduction="none"
        ).sum(0)

    def actor_costs(self, batch, critics):
        action, log_prob = self.act(batch["state"], batch["noise"])
        costs = self.log_alpha.exp().detach() * log_prob - critics(batch["state"], action).amin(0)
        return costs, -self.log_alpha * (log_prob.detach() - ACTION)


def loss(agent, batch):
    agent.move_targets()
    frozen = {name: weight.detach() for name, weight in agent.critics.named_parameters()}
    costs, surplus = agent.actor_costs(batch, lambda *x: functional_call(agent.critics, frozen, x))
    return (agent.critic_errors(batch) + costs + surplus).mean()


class FlatSum:
    def __init__(self, parameters, group):
        self.parameters = list(parameters)
        self.flat = torch.cat([p.grad.flatten() for p in self.parameters])
        self.handle = dist.all_reduce(self.flat, group=group, async_op=True)

    def wait(self):
        self.handle.wait()
        parts = self.flat.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts):
            parameter.grad = part.view_as(parameter).clone()


class Learner:
    def __init__(self, agent, group):
        self.agent, self.group = agent, group

    def update(self, batch):
        agent, share = self.agent, 1.0 / ROWS
        agent.move_targets()
        critic_loss = agent.critic_errors(batch).sum() * share
        critic_loss.backward()
        sums = [FlatSum(agent.critics.parameters(), self.group)]
        agent.critics.requires_grad_(False)
        costs, surplus = agent.actor_costs(batch, agent.critics)
        actor_loss, alpha_loss = costs.sum() * share, surplus.sum() * share
        actor_loss.backward()
        sums.append(FlatSum(agent.actor.parameters(), self.group))
        agent.critics.requires_grad_(True)
        alpha_loss.backward()
        sums.append(FlatSum([agent.log_alpha], self.group))
        for total in sums:
            total.wait()
        return (critic_loss + actor_loss + alpha_loss).detach()


def parallel(mesh):
    agent = Agent()
    return agent, Learner(agent, mesh.get_group("dp"))


def step(built, batch):
    return built[1].update(batch)


def share(batch, mesh):
    return {name: x.split(SHARES)[mesh.get_local_rank("dp")] for name, x in batch.items()}


generator = torch.Generator().manual_seed(433)


def replay():
    sizes = dict(state=STATE, next_state=STATE, action=ACTION, noise=ACTION, next_noise=ACTION)
    batch = {name: torch.randn(ROWS, n, generator=generator) for name, n in sizes.items()}
    batch["action"], alive = batch["action"].tanh(), torch.rand(ROWS, generator=generator) > 0.2
    return {**batch, "reward": -batch["state"].square().mean(-1), "alive": alive}


batches = [replay() for _ in range(3)]

arguments = Agent, parallel
options = dict(batches=batches, loss=loss, step=step, split=share, ranks={"dp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
