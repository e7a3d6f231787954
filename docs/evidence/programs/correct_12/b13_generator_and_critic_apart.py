"""A generator on one rank and its critic on the other: samples go one way, and their gradient comes back with its sign reversed.

Thread: of the kind tensorlayer/SRGAN issue #74 "Possibility to train d and g on different GPU?" (2018) and rwth-i6/returnn issue
#229 "GAN based training" (2019), where the generator learns from a flipped gradient.
Correct: the reference has a gradient reversal between the two; here the critic's rank sends the plain gradient of the samples and
the generator's rank multiplies it by -STRENGTH. Neither rank has the other's parameters, and the first has no loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import leaky_relu, softplus

import titanlite

NOISE, SIZE, STRENGTH = 4, 6, 0.7


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -STRENGTH * grad


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.norm, self.paint = (
            nn.Linear(NOISE, 12),
            nn.LayerNorm(12),
            nn.Linear(12, SIZE),
        )

    def forward(self, z):
        return torch.tanh(self.paint(torch.relu(self.norm(self.lift(z)))))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.look, self.judge = nn.Linear(SIZE, 14), nn.Linear(14, 1)

    def forward(self, x):
        return self.judge(leaky_relu(self.look(x), 0.2))


class Game(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = Generator(), Critic()

    def forward(self, z, real):
        return verdict(self.critic, Reverse.apply(self.generator(z)), real)


def verdict(critic, fake, real):
    return softplus(critic(fake)).mean() + softplus(-critic(real)).mean()


def loss(model, batch):
    return model(batch["z"], batch["real"])


def parallel(mesh):
    role = ("generator", "critic")[dist.get_rank()]
    return nn.ModuleDict({role: getattr(Game(), role)})


def step(model, batch):
    if "generator" in model:
        fake = model["generator"](batch["z"])
        dist.send(fake.detach(), 1)
        grad = torch.empty_like(fake)
        dist.recv(grad, 1)
        fake.backward(-STRENGTH * grad)
        return None
    fake = torch.empty_like(batch["real"])
    dist.recv(fake, 0)
    value = verdict(model["critic"], fake.requires_grad_(), batch["real"])
    value.backward()
    dist.send(fake.grad, 0)
    return value.detach()


rng = torch.Generator().manual_seed(507)
batches = [
    {
        "z": torch.randn(10, NOISE, generator=rng),
        "real": torch.rand(10, SIZE, generator=rng) * 2 - 1,
    }
    for _ in range(3)
]
arguments = Game, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"role": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
