"""PPO of processes with their own episodes, whose gradients are averaged through numpy views.

Thread: openai/spinningup, spinup/utils/mpi_pytorch.py and spinup/algos/pytorch/ppo/ppo.py (2020): mpi_avg_grads writes
the mean into p.grad.numpy(), PPOBuffer.get normalizes the advantages with mpi_statistics_scalar.
Correct: `p.grad.numpy()` is a view, so what is written to it is the gradient that the optimizer sees, although no
operation of PyTorch has touched the tensor. The advantages' mean and deviation are those of all processes, and all
have as many steps, so the mean of the ranks' gradients is the gradient of the mean. The coefficient of the KL penalty
is a number that the mean KL of all ranks doubles or halves after each loss, alike on all ranks.
"""

import itertools

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal

import titanlite

EPISODES, LENGTH, OBSERVATION, ACTION, WIDTH = 8, 9, 6, 2, 16
GAMMA, LAMBDA, CLIP_RATIO, ENTROPY, TARGET_KL = 0.98, 0.95, 0.2, 0.01, 0.05


def mpi_sum(x):
    """As MPI.SUM on numpy arrays or numbers."""
    buffer = torch.from_numpy(np.array(x, dtype=np.float64, ndmin=1))
    dist.all_reduce(buffer)
    return buffer.numpy().reshape(np.shape(x))


def mpi_avg(x):
    return mpi_sum(x) / dist.get_world_size()


def mpi_statistics_scalar(x):
    total, count = mpi_sum([x.sum(), x.size])
    mean = total / count
    return mean, np.sqrt(mpi_sum(np.square(x - mean).sum()) / count)


def mpi_avg_grads(module):
    for p in module.parameters():
        p_grad_numpy = p.grad.numpy()
        p_grad_numpy[:] = mpi_avg(p_grad_numpy)


def statistics_scalar(x):
    return x.mean(), x.std()


def mlp(*sizes):
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu_net = mlp(OBSERVATION, WIDTH, WIDTH, ACTION)
        self.log_std = nn.Parameter(-0.5 * torch.ones(ACTION))
        self.v_net = mlp(OBSERVATION, WIDTH, WIDTH, 1)
        self.kl_coef = 0.2

    def policy(self, obs):
        return Normal(self.mu_net(obs), self.log_std.exp())

    def update_kl_coef(self, kl):
        if kl > 1.5 * TARGET_KL:
            self.kl_coef *= 2
        elif kl < TARGET_KL / 1.5:
            self.kl_coef /= 2


def discount_cumsum(x, discount):
    out = np.zeros_like(x)
    running = np.zeros(len(x))
    for t in reversed(range(x.shape[1])):
        running = x[:, t] + discount * running
        out[:, t] = running
    return out


def advantages_and_returns(batch, statistics):
    """Of the values that the buffer has kept, in numpy."""
    rewards, values = batch["rew"].numpy(), batch["val"].numpy()
    deltas = rewards + GAMMA * values[:, 1:] - values[:, :-1]
    advantages = discount_cumsum(deltas, GAMMA * LAMBDA)
    mean, deviation = statistics(advantages)
    rewards = np.concatenate([rewards, values[:, -1:]], axis=1)
    returns = discount_cumsum(rewards, GAMMA)[:, :-1]
    return torch.from_numpy((advantages - mean) / deviation), torch.from_numpy(returns)


def compute_loss(model, batch, statistics, average):
    advantages, returns = advantages_and_returns(batch, statistics)
    pi = model.policy(batch["obs"])
    log_ratio = pi.log_prob(batch["act"]).sum(-1) - batch["logp"]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO) * advantages
    loss_pi = -torch.min(ratio * advantages, clipped).mean() - ENTROPY * pi.entropy().mean()
    kl = (ratio - 1 - log_ratio).mean()
    loss_v = (model.v_net(batch["obs"]).squeeze(-1) - returns).square().mean()
    value = loss_pi + model.kl_coef * kl + 0.5 * loss_v
    model.update_kl_coef(average(kl.item()))
    return value


def plain():
    return ActorCritic()


def parallel():
    return ActorCritic()


def loss(model, batch):
    return compute_loss(model, batch, statistics_scalar, float)


def step(model, batch):
    value = compute_loss(model, batch, mpi_statistics_scalar, mpi_avg)
    value.backward()
    mpi_avg_grads(model)
    return value.item()


generator = torch.Generator().manual_seed(2020)


def episodes(drift):
    def draw(*shape):
        return torch.randn(EPISODES, LENGTH, *shape, generator=generator, dtype=torch.float64)

    act = draw(ACTION) * 0.7
    logp = -(act.square() * np.e + np.log(2 * np.pi) - 1).sum(-1) / 2
    return {
        "obs": draw(OBSERVATION),
        "act": act,
        "rew": draw() + torch.arange(EPISODES)[:, None] / 4,
        "val": torch.cat([draw() * 0.3, draw()[:, :1] * 0.1], dim=1),
        "logp": logp + drift * draw(),
    }


batches = [episodes(drift) for drift in (0.02, 0.6, 0.6)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="world",
    ranks=4,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
