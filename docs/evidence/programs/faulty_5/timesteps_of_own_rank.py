"""PPO with annealed clip range and entropy bonus: each worker advances the schedule by its own timesteps.

Thread: https://github.com/hill-a/stable-baselines/pull/52 "Fixed MpiAdam synchronization issue in PPO1" ("PPO1 was not
summing the timesteps_so_far variable across all MPI workers", which made the schedule differ between them), 2018-10-05.
Wrong: timesteps_so_far counts the steps of the rank's own episodes, so the schedule is too slow, and the ranks have
different coefficients as their episodes have different lengths.
EXPECT: step 1 agrees in loss and gradients; the buffer timesteps_so_far differs after it, on each rank, as the counts
are not summed over dp. From step 2 on the loss and the gradients differ because of it (entropy coefficient and clip
range are annealed by the local count).
"""

import torch
import torch.distributed as dist
from torch import nn

import titanlite

OBSERVATIONS, ACTIONS, DIM, LENGTH, TOTAL = 5, 4, 16, 8, 4000


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVATIONS, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.norm, self.logits = nn.LayerNorm(DIM), nn.Linear(DIM, ACTIONS)
        self.register_buffer("timesteps_so_far", torch.tensor(0))

    def forward(self, observations):
        return self.logits(torch.tanh(self.norm(self.body(observations))))

    def multiplier(self):
        return (1 - self.timesteps_so_far / TOTAL).clamp(min=0.0)


def ppo_loss(model, batch, num_steps):
    multiplier, mask = model.multiplier(), batch["mask"]
    logp = model(batch["observations"]).log_softmax(-1)
    taken = logp.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    ratio, clip = (taken - batch["old_logp"]).exp(), 0.2 * multiplier
    advantages = batch["advantages"]
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    entropy = -(logp.exp() * logp).sum(-1)
    model.timesteps_so_far += mask.sum()
    return -((surrogate + 0.02 * multiplier * entropy) * mask).sum() / num_steps


def loss(model, batch):
    return ppo_loss(model, batch, batch["mask"].sum())


def parallel(mesh):
    model = Policy()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return model


def step(model, batch):
    num_steps = batch["mask"].sum()
    dist.all_reduce(num_steps)
    value = ppo_loss(model, batch, num_steps / dist.get_world_size())
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value.detach()


generator = torch.Generator().manual_seed(52)


def rollout():
    lengths = torch.randint(2, LENGTH + 1, (8, 1), generator=generator)
    return {
        "observations": torch.randn(8, LENGTH, OBSERVATIONS, generator=generator),
        "actions": torch.randint(ACTIONS, (8, LENGTH), generator=generator),
        "old_logp": -1.4 + 0.2 * torch.randn(8, LENGTH, generator=generator),
        "advantages": torch.randn(8, LENGTH, generator=generator),
        "mask": (torch.arange(LENGTH) < lengths).long(),
    }


batches = [rollout() for _ in range(4)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
