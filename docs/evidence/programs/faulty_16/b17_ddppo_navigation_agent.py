"""A navigation agent trained with decentralized distributed PPO, four workers with environments of their own.

Thread: facebookresearch/habitat-lab issue #346 "DD-PPO does not all reduce gradients" (2020): the class inherits from PPO
first and from the distributed mixin second, so the hook at the backward pass that runs (before_backward there) is PPO's own
and not the mixin's, and the gradients of the workers are never reduced.
Fault: DDPPO lists PPO before DecentralizedDistributedMixin; the method resolution order finds PPO.after_backward, which does
nothing, and not the mixin's, which averages the gradients.
REPAIR: `class DDPPO(PPO, DecentralizedDistributedMixin):` -> `class DDPPO(DecentralizedDistributedMixin, PPO):`
A right first sentence says: the gradients are never all-reduced over the workers, since PPO's empty after_backward hides the
one of the distributed mixin (order of the base classes of DDPPO), so each rank updates with the gradients of its own rollouts.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

ACTIONS, HIDDEN, STEPS, SIZE = 4, 16, 5, 7


class Policy(nn.Module):
    """Depth camera and previous action, a recurrent state, an actor and a critic."""

    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(6 * 9, HIDDEN),
            nn.ReLU(),
        )
        self.previous = nn.Embedding(ACTIONS + 1, 4)
        self.rnn = nn.GRU(HIDDEN + 4, HIDDEN, batch_first=True)
        self.actor, self.critic = nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, 1)

    def forward(self, depth, previous, actions):
        number, steps = actions.shape
        seen = self.visual(depth.flatten(0, 1)).view(number, steps, -1)
        features, _ = self.rnn(torch.cat([seen, self.previous(previous)], dim=-1))
        logps = self.actor(features).log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1).mean()
        logps = logps.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return self.critic(features).squeeze(-1), logps, entropy


class PPO:
    def __init__(self, actor_critic, clip=0.2, value_coef=0.5, entropy_coef=0.01):
        self.actor_critic = actor_critic
        self.clip, self.value_coef, self.entropy_coef = clip, value_coef, entropy_coef

    def losses(self, batch):
        values, logps, entropy = self.actor_critic(
            batch["depth"], batch["previous"], batch["actions"]
        )
        advantages = batch["returns"] - batch["old_values"]
        ratio = (logps - batch["old_logps"]).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        action_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss = 0.5 * F.mse_loss(values, batch["returns"])
        return action_loss + self.value_coef * value_loss - self.entropy_coef * entropy

    def update(self, batch):
        total = self.losses(batch)
        self.before_backward(total)
        total.backward()
        self.after_backward(total)
        return total.detach()

    def before_backward(self, total):
        pass

    def after_backward(self, total):
        pass


class DecentralizedDistributedMixin:
    def init_distributed(self):
        for parameter in self.actor_critic.parameters():
            dist.broadcast(parameter.data, 0)

    def after_backward(self, total):
        for parameter in self.actor_critic.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class DDPPO(PPO, DecentralizedDistributedMixin):
    pass


def plain():
    return Policy()


def parallel(mesh):
    policy = Policy()
    agent = DDPPO(policy)
    agent.init_distributed()
    return policy, agent


def loss(model, batch):
    return PPO(model).losses(batch)


def step(built, batch):
    return built[1].update(batch)


generator = torch.Generator().manual_seed(346)


def rollouts(number=8):
    shape = number, STEPS
    actions = torch.randint(0, ACTIONS, shape, generator=generator)
    start = torch.full((number, 1), ACTIONS)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    return {
        "depth": torch.rand(*shape, 1, SIZE, SIZE, generator=generator, dtype=torch.float64),
        "previous": torch.cat([start, actions[:, :-1]], dim=1),
        "actions": actions,
        "old_logps": uniform * 0.4 - 1.6,
        "old_values": torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3,
        "returns": torch.randn(shape, generator=generator, dtype=torch.float64),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 4},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2.5e-3, eps=1e-5),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
