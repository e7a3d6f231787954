"""GRPO of a policy that writes routes through a city, FSDP2; some of a prompt's rollouts have been filtered out.

Thread: THUDM/slime pull request #1918 "Fix RolloutManager reward normalization for uneven rollout groups" (2026): when
the flattened batch doesn't have n_samples_per_prompt rewards for every prompt, the fallback reshapes all rewards to one
row, and samples of unrelated groups share one mean and standard deviation.
Fault: RolloutManager.advantages reshapes the rank's rewards by `rewards.view(-1, rewards.shape[-1])` when groups are
uneven; all routes of the rank are normalized as if they answered one prompt.
REPAIR: `rows = [rewards.view(-1, rewards.shape[-1])]` -> `rows = [rewards[groups == g] for g in groups.unique()]`
A right first sentence says: with groups of uneven size the rank's advantages are normalized over all its rewards in one
row instead of by prompt group, so advantages, loss and all gradients are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import titanlite

STREETS, PROMPT, ROUTE, WIDTH = 14, 3, 6, 16
SAMPLES, ROWS, CLIP, EPS = 4, 18, 0.2, 1e-4


class RoutePolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.streets = nn.Embedding(STREETS, WIDTH)
        self.lower = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.upper = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, STREETS)

    def forward(self, tokens):
        """Log-probabilities of the route's streets, all but the prompt."""
        x = self.streets(tokens[:, :-1])
        x = x + self.lower(x)[0]
        x = x + self.upper(x)[0]
        logps = self.head(self.norm(x)).log_softmax(-1)
        return logps.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)[:, PROMPT - 1 :]


def surrogate(logps, old_logps, advantages):
    """Clipped policy loss of every route, a mean over its streets."""
    ratio = (logps - old_logps).exp()
    advantages = advantages.unsqueeze(1)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean(1)


def group_advantages(rewards, groups):
    """Rewards normalized over the routes that answer the same prompt."""
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        own = rewards[groups == group]
        advantages[groups == group] = (own - own.mean()) / (own.std(correction=0) + EPS)
    return advantages


class RolloutManager:
    """Holds the rank's rollouts in the order of their prompts."""

    def advantages(self, rewards, groups):
        if all((groups == group).sum() == SAMPLES for group in groups.unique()):
            rows = rewards.view(-1, SAMPLES)
        else:
            rows = [rewards.view(-1, rewards.shape[-1])]
        rows = [(row - row.mean()) / (row.std(correction=0) + EPS) for row in rows]
        return torch.cat([row.flatten() for row in rows])


class Actor:
    def __init__(self, model, mesh):
        for layer in (model.lower, model.upper):
            fully_shard(layer, mesh=mesh)
        self.model, self.mesh = fully_shard(model, mesh=mesh), mesh
        self.rollouts = RolloutManager()

    def update(self, batch):
        advantages = self.rollouts.advantages(batch["rewards"], batch["groups"])
        value = surrogate(self.model(batch["tokens"]), batch["old_logps"], advantages).mean()
        value.backward()
        reported = value.detach().clone()
        dist.all_reduce(reported, group=self.mesh.get_group())
        return reported / self.mesh.size()


def plain():
    return RoutePolicy()


def parallel(mesh):
    actor = Actor(RoutePolicy(), mesh["dp"])
    return actor.model, actor


def loss(model, batch):
    advantages = group_advantages(batch["rewards"], batch["groups"])
    return surrogate(model(batch["tokens"]), batch["old_logps"], advantages).mean()


def step(built, batch):
    return built[1].update(batch)


generator = torch.Generator().manual_seed(1918)


def rollouts():
    """Groups of 4, 3 and 2 routes for each rank; no group is on both ranks."""
    groups = torch.tensor([4, 3, 2, 3, 4, 2])
    groups = torch.arange(len(groups)).repeat_interleave(groups)
    prompts = torch.randint(0, STREETS, (6, PROMPT), generator=generator)[groups]
    routes = torch.randint(0, STREETS, (ROWS, ROUTE), generator=generator)
    noise = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return {
        "tokens": torch.cat([prompts, routes], dim=1),
        "groups": groups,
        "rewards": 0.7 * groups + noise,
        "old_logps": -2.6
        + 0.1 * torch.randn(ROWS, ROUTE, generator=generator, dtype=torch.float64),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
