"""A learned simulator of interacting particles: every rank updates each second particle, and all ranks see the same systems.

Might be accused because: the weights are replicated but each rank runs them on other particles, taken in turns and not in
blocks; the gathers' backward passes sum over the ranks; the gradients are summed and never averaged; the loss of a rank is a
share of the whole loss; the last layer's states are not gathered at all.
Correct because: a rank's loss is the sum over its own particles divided by the number of all, so the shares add up to the
plain loss. A particle's state is made on one rank and read by all; the gather's backward pass adds what all readers send. A
weight's gradient is therefore the sum of what the ranks find for their particles.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

PARTICLES, KINDS, WIDTH, LAYERS, RADIUS = 10, 3, 14, 2, 1.5


class Alone:
    """One process owns all particles."""

    def own(self, x):
        return x

    def everyone(self, x):
        return x

    def total(self, x):
        return x


class Turns:
    """Particle i belongs to rank i modulo the number of ranks."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def own(self, x):
        return x[:, self.rank :: self.size]

    def everyone(self, x):
        return Interleave.apply(x, self)

    def total(self, x):
        x = x.detach().clone()
        dist.all_reduce(x, group=self.group)
        return x


class Interleave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, turns):
        ctx.turns = turns
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(turns.size)]
        dist.all_gather(parts, x, group=turns.group)
        return torch.stack(parts, dim=2).flatten(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return ctx.turns.own(ctx.turns.total(grad.contiguous())), None


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outputs))


class Interaction(nn.Module):
    """Messages from all particles within the radius to the receivers."""

    def __init__(self):
        super().__init__()
        self.message, self.update = mlp(2 * WIDTH + 3, WIDTH), mlp(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, states, places, turns):
        receivers, senders = turns.own(states), states
        gaps = turns.own(places).unsqueeze(2) - places.unsqueeze(1)
        distances = gaps.square().sum(-1, keepdim=True).add(1e-12).sqrt()
        shape = (*distances.shape[:3], WIDTH)
        pairs = torch.cat(
            [
                receivers.unsqueeze(2).expand(shape),
                senders.unsqueeze(1).expand(shape),
                gaps,
                distances,
            ],
            dim=-1,
        )
        near = (distances < RADIUS) & (distances > 1e-4)
        gathered = (self.message(pairs) * near).sum(2)
        return receivers + self.norm(self.update(torch.cat([receivers, gathered], dim=-1)))


class Simulator(nn.Module):
    def __init__(self, turns):
        super().__init__()
        self.turns = turns
        self.kind = nn.Embedding(KINDS, 4)
        self.encoder, self.decoder = mlp(4 + 2, WIDTH), mlp(WIDTH, 2)
        self.interactions = nn.ModuleList(Interaction() for _ in range(LAYERS))

    def forward(self, places, speeds, kinds):
        """The accelerations of the particles of this rank."""
        turns = self.turns
        x = torch.cat([turns.own(speeds), self.kind(turns.own(kinds))], dim=-1)
        x = self.encoder(x)
        for interaction in self.interactions:
            x = interaction(turns.everyone(x), places, turns)
        return self.decoder(x)


def loss(model, batch):
    places, speeds, kinds, accelerations = batch
    error = model(places, speeds, kinds) - model.turns.own(accelerations)
    return F.huber_loss(error, torch.zeros_like(error), reduction="sum") / accelerations.numel()


def sum_gradients(model):
    """One flat tensor, the last parameters first."""
    parameters = list(model.parameters())[::-1]
    flat = model.turns.total(torch.cat([p.grad.flatten() for p in parameters]))
    for p in parameters:
        p.grad, flat = flat[: p.numel()].view_as(p), flat[p.numel() :]


def plain():
    return Simulator(Alone())


def parallel(mesh):
    return Simulator(Turns(mesh.get_group("particles")))


def step(model, batch):
    share = loss(model, batch)
    share.backward()
    sum_gradients(model)
    return model.turns.total(share)


generator = torch.Generator().manual_seed(20)


def systems(number=3):
    def randn(*shape):
        return torch.randn(number, PARTICLES, *shape, generator=generator, dtype=torch.float64)

    kinds = torch.randint(0, KINDS, (number, PARTICLES), generator=generator)
    return randn(2), randn(2), kinds, randn(2)


batches = [systems() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"particles": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
