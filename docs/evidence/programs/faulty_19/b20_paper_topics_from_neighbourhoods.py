"""GraphSAGE classifies the papers of a citation graph; the labelled papers of a step are dealt over the ranks under DDP.

Thread: pyg-team/pytorch_geometric issue #9744 "Error in splitting indices in distributed_sampling.py" (2024): the example
splits the training nodes into pieces of len // world_size; with a remainder there are more pieces than ranks.
Fault: own_seeds splits the labelled papers into pieces of the rounded-down size, and each rank takes the piece of its number;
the last three of eleven papers are in pieces that nobody trains on.
REPAIR: `seeds.split(len(seeds) // world)[rank]` -> `seeds.tensor_split(world)[rank]`
A right first sentence says: the labelled nodes are split with a rounded-down size, so the remainder at the end belongs to no
rank and its terms are missing from the loss and from all the gradients.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

PAPERS, CITATIONS, INPUTS, HIDDEN, TOPICS, SEEDS = 40, 120, 8, 12, 4, 11


class Graph:
    """Both directions of the citations, without repetitions."""

    def __init__(self, generator):
        ends = torch.randint(0, PAPERS, (2, CITATIONS), generator=generator)
        self.edges = torch.cat([ends, ends.flip(0)], dim=1).unique(dim=1)
        self.x = torch.randn(PAPERS, INPUTS, generator=generator, dtype=torch.float64)
        self.topics = torch.randint(0, TOPICS, (PAPERS,), generator=generator)

    def hop(self, nodes):
        """The edges that end in these nodes, and the nodes of both ends, the old ones first."""
        edges = self.edges[:, torch.isin(self.edges[1], nodes)]
        new = edges[0][~torch.isin(edges[0], nodes)].unique()
        return edges, torch.cat([nodes, new])

    def neighbourhood(self, seeds, hops):
        """What the layers need for these seeds: the outermost edges first."""
        nodes, layers = seeds, []
        for _ in range(hops):
            targets = nodes
            edges, nodes = self.hop(targets)
            place = torch.zeros(PAPERS, dtype=torch.long)
            place[nodes] = torch.arange(len(nodes))
            layers.insert(0, (place[edges], len(targets)))
        return self.x[nodes], layers


class SAGEConv(nn.Module):
    """Own features and the mean of the neighbours'."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edges, targets):
        source, target = edges
        total = x.new_zeros(targets, x.size(-1)).index_add(0, target, x[source])
        degree = torch.bincount(target, minlength=targets).clamp(min=1).unsqueeze(-1)
        return self.lin_l(total / degree) + self.lin_r(x[:targets])


class GraphSAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(INPUTS, HIDDEN), SAGEConv(HIDDEN, HIDDEN)])
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in self.convs)
        self.head = nn.Linear(HIDDEN, TOPICS)

    def forward(self, x, layers):
        for conv, norm, (edges, targets) in zip(self.convs, self.norms, layers):
            x = F.relu(norm(conv(x, edges, targets)))
        return self.head(x)


generator = torch.Generator().manual_seed(9744)
graph = Graph(generator)


def summed_loss(model, seeds):
    x, layers = graph.neighbourhood(seeds, hops=2)
    return F.cross_entropy(model(x, layers), graph.topics[seeds], reduction="sum")


def own_seeds(seeds):
    """Cuts the labelled papers into one piece for each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return seeds.split(len(seeds) // world)[rank]


def plain():
    return GraphSAGE()


def parallel(mesh):
    return DistributedDataParallel(GraphSAGE())


def loss(model, seeds):
    return summed_loss(model, seeds) / len(seeds)


def step(model, seeds):
    """Pieces may differ in length: a share of the whole mean, times what DDP divides by."""
    value = summed_loss(model, own_seeds(seeds)) / len(seeds)
    (value * dist.get_world_size()).backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def whole(seeds, mesh):
    return seeds


batches = [torch.randperm(PAPERS, generator=generator)[:SEEDS] for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=whole,
    ranks={"dp": 4},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
