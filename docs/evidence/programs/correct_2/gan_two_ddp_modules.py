"""A GAN of two DDP modules that are updated at the same time.

Thread: https://github.com/Lightning-AI/pytorch-lightning/issues/557 "The gan template does not seem to set
properly the gradients of the discriminator to zero" ("simultaneous gradient descent instead of
alternating updates"), 2019-11-28.
Right: in the generator's pass the discriminator is frozen and called without its DDP wrapper, since it
needs no gradients there; its own pass uses the detached images.
Must not be accused: a call of `.module`, or two backward passes in one step.
"""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

import titanlite


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.G = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 9), nn.Tanh())
        self.D = nn.Sequential(nn.Linear(9, 20), nn.LeakyReLU(0.2), nn.Linear(20, 1))


def plain_loss(nets, batch):
    fake = nets.G(batch["z"])
    constant = {name: p.detach() for name, p in nets.D.named_parameters()}
    g_loss = softplus(-functional_call(nets.D, constant, (fake,))).mean()
    d_loss = softplus(-nets.D(batch["real"])).mean() + softplus(nets.D(fake.detach())).mean()
    return g_loss + d_loss


class GanTrainer:
    def __init__(self, nets):
        self.G, self.D = nets.G, nets.D

    def step(self, batch):
        self.D.requires_grad_(False)
        fake = self.G(batch["z"])
        g_loss = softplus(-self.D.module(fake)).mean()
        g_loss.backward()
        self.D.requires_grad_(True)
        logits = self.D(torch.cat([batch["real"], fake.detach()]))
        real, generated = logits.chunk(2)
        d_loss = softplus(-real).mean() + softplus(generated).mean()
        d_loss.backward()
        return g_loss.detach() + d_loss.detach()


def build():
    nets = Networks()
    nets.G, nets.D = DistributedDataParallel(nets.G), DistributedDataParallel(nets.D)
    return nets, GanTrainer(nets)


def step(built, batch):
    return built[1].step(batch)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=2e-3, betas=(0.5, 0.99))


generator = torch.Generator().manual_seed(557)
batches = [
    {
        "real": torch.randn(8, 9, generator=generator).tanh(),
        "z": torch.randn(8, 5, generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Networks, build, optimizer=adam, microbatches=1, **options))
