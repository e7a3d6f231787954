"""A graph network on a partitioned graph: each rank has its nodes and copies of the nodes within two hops.

Thread: pyg-team/pytorch_geometric pull request #7931 "[Documentation] `NeighborLoader` Tutorial" (2023): "things to look out
for (e.g., ensuring to only make use of the first batch_size many nodes for loss/metric computation)", and of the kind
dmlc/dgl issue #2667 "Are HALO nodes evaluated?" (2021).
Fault: in step, the loss is taken over all nodes of the rank, the copied ones among them, whose outputs lack neighbours.
REPAIR: `out = model(batch["x"], batch["p"])` -> `out = model(batch["x"], batch["p"])[: batch["own"]]`
Expected: the outputs of each rank's own nodes (the first eight rows) agree; the loss and all gradients are wrong on both
ranks: the copies of the other rank's nodes (halo, rows from the ninth on) are counted in the loss, and in the number
of nodes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, elu
from torch.nn.parallel import DistributedDataParallel

import titanlite

NODES, FEATURES, HIDDEN, CLASSES = 16, 5, 8, 3


class SageConv(nn.Module):
    """The node itself, and the mean of its neighbours."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, p):
        return self.own(x) + self.neighbours(p @ x)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SageConv(FEATURES, HIDDEN), SageConv(HIDDEN, HIDDEN)
        self.classify = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x, p):
        return self.classify(elu(self.conv2(elu(self.conv1(x, p)), p)))


def loss(model, batch):
    return cross_entropy(model(batch["x"], batch["p"]), batch["y"])


def parallel(mesh):
    return DistributedDataParallel(GraphNet(), process_group=mesh.get_group("dp"))


def partition(batch, mesh):
    """The own nodes first, then the halo: two convolutions reach two hops."""
    own = torch.arange(NODES).chunk(mesh.size())[mesh.get_rank()]
    edges = batch["p"] > 0
    near = edges | (edges.double() @ edges.double() > 0)
    reached = near[own].any(0)
    reached[own] = False
    nodes = torch.cat([own, reached.nonzero()[:, 0]])
    return {
        "x": batch["x"][nodes],
        "p": batch["p"][nodes][:, nodes],
        "y": batch["y"][nodes],
        "own": torch.tensor(len(own)),
    }


def step(model, batch):
    out = model(batch["x"], batch["p"])
    count = torch.tensor(len(out))
    dist.all_reduce(count)
    value = cross_entropy(out, batch["y"][: len(out)], reduction="sum")
    value = dist.get_world_size() * value / count
    value.backward()
    return value


rng = torch.Generator().manual_seed(314)


def draw():
    i = torch.arange(NODES)
    edges = torch.zeros(NODES, NODES)
    edges[i, (i + 1) % NODES] = 1.0
    a, b = torch.randint(NODES, (2, 3), generator=rng)
    edges[a, b] = (a != b).to(edges.dtype)
    edges = torch.maximum(edges, edges.t())
    return {
        "x": torch.randn(NODES, FEATURES, generator=rng, dtype=torch.float64),
        "p": edges.double() / edges.double().sum(1, keepdim=True),
        "y": torch.randint(CLASSES, (NODES,), generator=rng),
    }


batches = [draw() for _ in range(3)]
arguments = GraphNet, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split=partition)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
