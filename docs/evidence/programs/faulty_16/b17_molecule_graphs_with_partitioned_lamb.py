"""A graph network that predicts a property of molecules, with LAMB partitioned over the ranks in the manner of ZeRO.

Thread: deepspeedai/DeepSpeed issue #490 "Parameter fusion in optimizer partition makes lamb behaves differently" (2020): the
parameters are fused into one vector that is partitioned over the workers, but LAMB and LARS need a scaling factor per layer;
run on the partitions they give other updates than without ZeRO.
Fault: PartitionedLamb.step takes a parameter's norm and the norm of its update from the elements that lie in the own
partition. A parameter that the partition's border cuts has a trust ratio of its own on each rank, and neither is the layer's.
REPAIR: `norms = squares.sqrt()` -> `dist.all_reduce(squares); norms = squares.sqrt()`
A right first sentence says: LAMB's trust ratio is computed from the local part of a parameter, as the squared norms of weight
and update aren't summed over the ranks that hold its parts, so parameters cut by partition borders get a wrong step.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

ATOMS, WIDTH, NODES = 5, 16, 6


class GraphConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = nn.Parameter(torch.full((1,), 0.1))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, bonds):
        return self.norm(x + self.mlp((1 + self.eps) * x + bonds @ x))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms = nn.Embedding(ATOMS, WIDTH)
        self.convs = nn.ModuleList(GraphConv() for _ in range(2))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, atoms, bonds):
        x = self.atoms(atoms)
        for conv in self.convs:
            x = conv(x, bonds)
        return self.out(x.sum(dim=1)).squeeze(-1)


def trust_ratio(weight_norm, update_norm):
    usable = (weight_norm > 0) & (update_norm > 0)
    return torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm))


class Lamb(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(
            list(parameters), dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        )

    def adam_update(self, key, weight, grad, group):
        state = self.state[key]
        if not state:
            state.update(step=0, m=torch.zeros_like(weight), v=torch.zeros_like(weight))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["m"].lerp_(grad, 1 - beta1)
        state["v"].lerp_(grad.square(), 1 - beta2)
        m = state["m"] / (1 - beta1 ** state["step"])
        v = state["v"] / (1 - beta2 ** state["step"])
        return m / (v.sqrt() + group["eps"]) + group["weight_decay"] * weight

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                update = self.adam_update(p, p, p.grad, group)
                p.sub_(group["lr"] * trust_ratio(p.norm(), update.norm()) * update)


class PartitionedLamb(Lamb):
    """All parameters in one flat vector, cut in equal parts; a rank keeps the state of its part."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, **settings)
        self.params = self.param_groups[0]["params"]
        sizes = [p.numel() for p in self.params]
        self.part = -(-sum(sizes) // dist.get_world_size())
        self.padding = self.part * dist.get_world_size() - sum(sizes)
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        owner = F.pad(owner, (0, self.padding), value=len(sizes))
        self.owner = owner.split(self.part)[dist.get_rank()]

    def flat(self, tensors):
        return F.pad(torch.cat([t.flatten() for t in tensors]), (0, self.padding))

    @torch.no_grad()
    def step(self, closure=None):
        group, rank = self.param_groups[0], dist.get_rank()
        grads = self.flat([p.grad for p in self.params])
        dist.all_reduce(grads)
        grad = grads.split(self.part)[rank] / dist.get_world_size()
        weight = self.flat(self.params).split(self.part)[rank].clone()
        update = self.adam_update("part", weight, grad, group)

        squares = weight.new_zeros(2, len(self.params) + 1)
        squares[0].index_add_(0, self.owner, weight.square())
        squares[1].index_add_(0, self.owner, update.square())
        norms = squares.sqrt()
        weight -= group["lr"] * trust_ratio(*norms)[self.owner] * update

        parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, weight)
        values = torch.cat(parts).split([p.numel() for p in self.params] + [self.padding])
        for p, value in zip(self.params, values):
            p.copy_(value.view_as(p))


def plain():
    return GraphNet()


def parallel(mesh):
    model = GraphNet()
    return model, PartitionedLamb(model.parameters())


def loss(model, batch):
    atoms, bonds, target = batch
    return F.mse_loss(model(atoms, bonds), target)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(490)


def molecules(number=8):
    bonds = (
        torch.rand(number, NODES, NODES, generator=generator, dtype=torch.float64) < 0.4
    ).double()
    bonds = torch.triu(bonds, 1)
    return (
        torch.randint(0, ATOMS, (number, NODES), generator=generator),
        bonds + bonds.transpose(1, 2),
        torch.randn(number, generator=generator, dtype=torch.float64),
    )


batches = [molecules() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 4}, optimizer=Lamb)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
