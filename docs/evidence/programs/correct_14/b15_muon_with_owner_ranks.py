"""Data parallel training with Muon where each matrix has an owner rank that alone gets its gradient and orthogonalizes it.

Thread: nil0x9/flash-muon issue #7 "Questions about multi-gpu shard update efficiency" (2025), on Muon's scheme of handing whole
matrices to ranks in turn and gathering the updated ones.
Correct: no gradient is averaged before the optimizer step, and of a matrix only its owner ever gets an averaged one; OwnerMuon
reduces each matrix's gradient to its owner, which alone keeps its momentum and updates all of it, and all-gathers the new values.
Matrices of one shape are dealt out in turn; where they don't fill a round, empty stand-ins pad it. The optimizer all-reduces
the gradients of the other parameters.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WIDTH = 12


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Mixer() for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def orthogonalize(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.size(0) > g.size(1) else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.size(0) > g.size(1) else x


class Muon(torch.optim.Optimizer):
    """Muon for matrices, momentum SGD for the rest."""

    def __init__(self, parameters, lr=0.02, momentum=0.95):
        super().__init__(list(parameters), dict(lr=lr, momentum=momentum))

    def update(self, p, group):
        state = self.state[p]
        buffer = state.setdefault("momentum", torch.zeros_like(p))
        buffer.mul_(group["momentum"]).add_(p.grad)
        direction = p.grad + group["momentum"] * buffer
        p.sub_(group["lr"] * (orthogonalize(direction) if p.ndim == 2 else direction))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)


class OwnerMuon(Muon):
    def reduce(self, tensor, owner=None):
        if owner is None:
            dist.all_reduce(tensor)
        else:
            dist.reduce(tensor, owner)
        if owner in (None, dist.get_rank()):
            tensor /= dist.get_world_size()

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                if p.ndim == 2:
                    by_shape.setdefault(p.shape, []).append(p)
                else:
                    self.reduce(p.grad)
                    self.update(p, group)
            for matrices in by_shape.values():
                for start in range(0, len(matrices), world):
                    turn = matrices[start : start + world]
                    for owner, p in enumerate(turn):
                        self.reduce(p.grad, owner)
                    padded = turn + [torch.empty_like(turn[0]) for _ in range(world - len(turn))]
                    if rank < len(turn):
                        self.update(turn[rank], group)
                    gathered = [torch.empty_like(turn[0]) for _ in range(world)]
                    dist.all_gather(gathered, padded[rank].detach())
                    for p, value in zip(turn, gathered):
                        p.copy_(value)


def plain():
    return Net()


def parallel(mesh):
    model = Net()
    return model, OwnerMuon(model.parameters())


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(7)
batches = [
    (
        torch.randn(8, 6, generator=generator, dtype=torch.float64),
        torch.randn(8, 4, generator=generator, dtype=torch.float64),
    )
    for _ in range(4)
]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 4}, optimizer=Muon)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
