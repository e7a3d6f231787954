"""A graph convolutional network whose edges are cut over the ranks: each rank normalizes by the degrees in its own part.

Thread: dmlc/dgl pull request #2918 "[Distributed] add distributed in-degree and out-degree" (2021), which also fixes that
the out-degree computed from the partitioned graph is incorrect.
Fault: in PartitionedConv.forward, the degrees of the nodes are counted in the rank's own edges and are not summed over
the ranks before they normalize the messages.
REPAIR: `degrees = torch.stack([count(ends, len(x)) for ends in edges])` -> `degrees = Sum.apply(torch.stack([count(ends, len(x)) for ends in edges]), self.group)`
Expected: in the forward pass, convs.0 is the first module whose output differs, on all ranks alike: the messages are
divided by the square roots of degrees that are counted in each rank's own edges, which are too small; the degrees have to
be summed over the ranks first.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

NODES, FEATURES, HIDDEN, CLASSES, EDGES = 8, 5, 10, 3, 24


class Copy(torch.autograd.Function):
    """The identity; in backward, the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def count(ends, nodes):
    return torch.bincount(ends, minlength=nodes)


class Conv(nn.Module):
    """The messages of an edge are divided by the square root of the degrees at its two ends."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.transform, self.own = (
            nn.Linear(inputs, outputs, bias=False),
            nn.Linear(inputs, outputs),
        )

    def messages(self, h, edges, degrees):
        (source, target), (outgoing, incoming) = edges, degrees.clamp(min=1)
        weights = (outgoing[source] * incoming[target]).to(h.dtype).rsqrt()
        return torch.zeros_like(h).index_add(0, target, weights[:, None] * h[source])

    def forward(self, x, edges):
        degrees = torch.stack([count(e, len(x)) for e in edges])
        return self.own(x) + self.messages(self.transform(x), edges, degrees)


class PartitionedConv(Conv):
    """Every rank has all nodes and a part of the edges; the sums of the messages are added up."""

    def __init__(self, whole, group):
        nn.Module.__init__(self)
        self.transform, self.own, self.group = whole.transform, whole.own, group

    def forward(self, x, edges):
        degrees = torch.stack([count(ends, len(x)) for ends in edges])
        h = Copy.apply(self.transform(x), self.group)
        return self.own(x) + Sum.apply(self.messages(h, edges, degrees), self.group)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([Conv(FEATURES, HIDDEN), Conv(HIDDEN, CLASSES)])

    def forward(self, x, edges):
        first, second = self.convs
        return second(torch.relu(first(x, edges)), edges)


def loss(model, batch):
    return cross_entropy(model(batch["x"], batch["edges"]), batch["y"])


def parallel(mesh):
    model = Network()
    model.convs = nn.ModuleList(
        PartitionedConv(conv, mesh.get_group("part")) for conv in model.convs
    )
    return model


def split(batch, mesh):
    edges = batch["edges"].chunk(mesh["part"].size(), 1)[mesh.get_local_rank("part")]
    return {**batch, "edges": edges}


generator = torch.Generator().manual_seed(213)


def draw():
    return {
        "x": torch.randn(NODES, FEATURES, generator=generator),
        "edges": torch.randint(NODES, (2, EDGES), generator=generator),
        "y": torch.randint(CLASSES, (NODES,), generator=generator),
    }


batches = [draw() for _ in range(3)]
arguments = Network, parallel
options = dict(batches=batches, loss=loss, ranks={"part": 2}, split=split)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
