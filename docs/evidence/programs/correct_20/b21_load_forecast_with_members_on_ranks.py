"""A deep ensemble that forecasts electric load; each rank holds and trains one member, and the loss is that of their mixture.

Might be accused because: the ranks hold different weights on purpose, no gradient is reduced at all, and every rank reads the
whole batch; a rank's own likelihood isn't the loss either.
Correct because: a member's weights lie on one rank only, so there is nothing to add up; the members' likelihoods are joined over
the ranks before the loss, and the joining passes each member the gradient of its own likelihood, its share of the mixture.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

HISTORY, HORIZON, WEATHER, WIDTH, MEMBERS, SITES = 12, 4, 2, 10, 3, 6


class Forecaster(nn.Module):
    """Encodes the history with a GRU; gives a Gaussian for each hour of the horizon."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(1 + WEATHER, WIDTH, batch_first=True)
        self.hours = nn.Parameter(torch.randn(HORIZON, WIDTH) * 0.3)
        self.mean, self.log_scale = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, history, load):
        """The log-likelihood of each site's future load."""
        _, state = self.encoder(history)
        x = torch.tanh(state[0].unsqueeze(1) + self.hours)
        mean, log_scale = self.mean(x).squeeze(-1), self.log_scale(x).squeeze(-1)
        error = (load - mean) * (-log_scale).exp()
        return (-error.square() / 2 - log_scale).sum(1)


class JoinMembers(torch.autograd.Function):
    """log of the sum of exp over the ranks' values."""

    @staticmethod
    def forward(ctx, x, group):
        largest = x.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        total = (x - largest).exp()
        dist.all_reduce(total, group=group)
        joined = largest + total.log()
        ctx.save_for_backward(x, joined)
        return joined

    @staticmethod
    def backward(ctx, grad):
        x, joined = ctx.saved_tensors
        return grad * (x - joined).exp(), None


class Ensemble(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.members = nn.ModuleDict({f"member{i}": Forecaster() for i in range(MEMBERS)})
        if group is not None:
            own = f"member{dist.get_rank(group)}"
            for name in set(self.members) - {own}:
                del self.members[name]

    def forward(self, history, load):
        logps = [member(history, load) for member in self.members.values()]
        if self.group is None:
            return torch.stack(logps).logsumexp(0)
        return JoinMembers.apply(logps[0], self.group)


def plain():
    return Ensemble()


def parallel(mesh):
    return Ensemble(mesh.get_group("members"))


def loss(model, batch):
    mixture = model(*batch)
    penalty = F.softplus(mixture.mean() - 5)
    return penalty - mixture.mean() / HORIZON


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(2016)


def week():
    hours = torch.arange(HISTORY + HORIZON, dtype=torch.float64)
    phase = 6.3 * torch.rand(SITES, 1, generator=generator, dtype=torch.float64)
    weather = torch.randn(SITES, HISTORY, WEATHER, generator=generator, dtype=torch.float64)
    noise = torch.randn(SITES, len(hours), generator=generator, dtype=torch.float64)
    load = (hours / 4 + phase).sin() + 0.2 * noise
    return torch.cat([load[:, :HISTORY, None], weather], dim=-1), load[:, HISTORY:].contiguous()


batches = [week() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"members": MEMBERS},
    optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
