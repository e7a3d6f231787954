"""Atom charges from a graph network with sum, maximum and deviation of its messages (as in PNA); edges are dealt to
ranks.

Thread: NVIDIA/physicsnemo pull request #139 "[FEA] distributed gnn primitives" (2023): primitives for one large graph
whose edges and nodes are spread over ranks, with gradients that follow the exchange.
Correct: the all-reduce of the maximum has no collective in its backward pass. What follows the aggregation is
computed by all ranks alike, so each holds the whole gradient; it passes this to those of its edges that reach the
maximum, divided by their number on all ranks, as amax does. Ties are common: half of the bonds are listed twice. The
sums have the identity as backward pass for the same reason, the node features that enter the messages an all-reduce.
Only message networks see a part of the edges, so that their gradients alone are summed.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

ATOMS, FEATURES, BONDS, WIDTH, EDGES = 11, 5, 3, 12, 31


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class MaxOfEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, messages, target, group):
        index = target[:, None].expand_as(messages)
        highest = torch.full((ATOMS, messages.shape[1]), -torch.inf, dtype=messages.dtype)
        highest.scatter_reduce_(0, index, messages, "amax")
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        winners = (messages == highest[target]).to(messages.dtype)
        shared = torch.zeros_like(highest).scatter_add_(0, index, winners)
        dist.all_reduce(shared, group=group)
        ctx.save_for_backward(winners / shared[target], target)
        return highest.masked_fill(highest.isinf(), 0.0)

    @staticmethod
    def backward(ctx, gradient):
        part, target = ctx.saved_tensors
        return part * gradient[target], None, None


class OneProcess:
    def enter(self, x):
        return x

    def sum(self, messages, target):
        return messages.new_zeros(ATOMS, messages.shape[1]).index_add(0, target, messages)

    def max(self, messages, target):
        zeros, index = messages.new_zeros(ATOMS, WIDTH), target[:, None].expand_as(messages)
        return zeros.scatter_reduce(0, index, messages, "amax", include_self=False)


class EdgeRanks(OneProcess):
    def __init__(self, group):
        self.group = group

    def enter(self, x):
        x = x.clone()
        x.register_hook(lambda gradient: Sum.apply(gradient, self.group))
        return x

    def complete(self, parameter):
        dist.all_reduce(parameter.grad, group=self.group)

    def sum(self, messages, target):
        return Sum.apply(super().sum(messages, target), self.group)

    def max(self, messages, target):
        return MaxOfEdges.apply(messages, target, self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        ends, bond = nn.Linear(WIDTH, 2 * WIDTH), nn.Embedding(BONDS, WIDTH)
        self.message = nn.ModuleDict({"ends": ends, "bond": bond})
        self.update = nn.Sequential(nn.Linear(4 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, edges, bonds, ranks):
        (source, target), ends = edges.T, self.message["ends"](ranks.enter(x)).unflatten(1, (2, -1))
        messages = F.relu(ends[source, 0] + ends[target, 1] + self.message["bond"](bonds))
        degree = ranks.sum(torch.ones(len(edges), 1), target).clamp(min=1)
        mean = ranks.sum(messages, target) / degree
        deviation = (ranks.sum(messages.square(), target) / degree - mean.square() + 1e-3).sqrt()
        views = [x, mean * torch.log1p(degree), ranks.max(messages, target), deviation]
        return x + self.update(self.norm(torch.stack(views, 1)).flatten(1))


class Charges(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.layers, self.ranks = nn.ModuleList(Layer() for _ in range(2)), OneProcess()

    def forward(self, batch):
        x = self.atoms(batch["atoms"])
        for layer in self.layers:
            x = layer(x, batch["edges"], batch["bonds"], self.ranks)
        return self.head(x).squeeze(-1)


def parallel(mesh):
    model = Charges()
    model.ranks = EdgeRanks(mesh.get_group("edge"))
    for name, parameter in model.named_parameters():
        if ".message." in name:
            parameter.register_post_accumulate_grad_hook(model.ranks.complete)
    return model


def loss(model, batch):
    return F.mse_loss(model(batch), batch["charges"])


def deal(batch, mesh):
    own = slice(mesh.get_local_rank("edge"), None, mesh.size())
    return {**batch, "edges": batch["edges"][own], "bonds": batch["bonds"][own]}


generator = torch.Generator().manual_seed(139)


def molecule():
    edges = torch.randint(ATOMS - 1, (EDGES, 2), generator=generator)
    bonds = torch.randint(BONDS, (EDGES,), generator=generator)
    atoms, twice = torch.randn(ATOMS, FEATURES + 1, generator=generator), torch.arange(47) % EDGES
    return dict(atoms=atoms[:, 1:], edges=edges[twice], bonds=bonds[twice], charges=atoms[:, 0])


batches = [molecule() for _ in range(3)]

arguments = Charges, parallel
options = dict(batches=batches, loss=loss, split=deal, ranks={"edge": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
