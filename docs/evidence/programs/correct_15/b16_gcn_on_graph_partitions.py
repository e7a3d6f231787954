"""Full-graph training of a graph convolutional network whose nodes are partitioned over ranks, with an exchange of halo nodes.

Thread: dmlc/dgl issue #5084 "[RFC] Add support for distributed full-graph training and inference" (2022): layers fetch the remote
neighbours' features, and the backward pass sends their gradients back to the owners.
Correct: partitions have 6, 5 and 3 nodes, the last without a node for training, so one rank's loss is zero. Gradients of the
weights are summed and not averaged, as each rank's loss is its sum divided by the number of training nodes of the whole graph.
The rank without a loss still gets gradients, since the halo exchange returns those of its nodes' features. Degrees are exchanged
as features are, so that an edge is normalized by the degrees in the whole graph.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

NODES, FEATURES, WIDTH, CLASSES = (6, 5, 3), 5, 9, 4


class Whole:
    """The graph in one process: edges are pairs (source, target)."""

    def __init__(self, edges, count):
        self.source, self.target = edges
        self.count = count

    def fetch(self, x):
        return x


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty(sum(receive), rows.size(1))
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), grad.size(1))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class Partition:
    """The edges into a rank's own nodes; sources elsewhere are appended to the own ones as halo."""

    def __init__(self, edges, rank):
        starts = torch.tensor([0, *NODES]).cumsum(0).tolist()
        owner = torch.arange(len(NODES)).repeat_interleave(torch.tensor(NODES))
        self.count = NODES[rank]

        def halo(of, part):
            source, target = edges
            needed = source[(owner[target] == of) & (owner[source] == part)].unique()
            return needed if of != part else needed[:0]

        ranks = range(len(NODES))
        wanted = [halo(rank, part) for part in ranks]
        offered = [halo(of, rank) - starts[rank] for of in ranks]
        self.receive, self.send = [len(part) for part in wanted], [len(part) for part in offered]
        self.offered = torch.cat(offered)

        place = torch.full((sum(NODES),), -1)
        place[starts[rank] : starts[rank + 1]] = torch.arange(self.count)
        place[torch.cat(wanted)] = self.count + torch.arange(sum(self.receive))
        source, target = edges[:, owner[edges[1]] == rank]
        self.source, self.target = place[source], place[target]

    def fetch(self, x):
        return torch.cat([x, Exchange.apply(x[self.offered], self.send, self.receive)])


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.neighbours, self.itself = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x, graph):
        ones = x.new_ones(len(graph.target), 1)
        degree = x.new_ones(graph.count, 1).index_add(0, graph.target, ones)
        y = graph.fetch(self.neighbours(x) * degree.rsqrt())
        total = x.new_zeros(graph.count, y.size(1)).index_add(0, graph.target, y[graph.source])
        return self.itself(x) + total * degree.rsqrt()


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = FEATURES, WIDTH, WIDTH, CLASSES
        self.layers = nn.ModuleList(GraphConv(a, b) for a, b in pairwise(sizes))

    def forward(self, x, graph):
        for layer in self.layers[:-1]:
            x = F.elu(layer(x, graph))
        return self.layers[-1](x, graph)


def plain():
    return Gcn()


def parallel(mesh):
    return Gcn()


def training_loss(model, batch, graph):
    logits, train = model(batch["x"], graph), batch["train"]
    return F.cross_entropy(logits[train], batch["y"][train], reduction="sum")


def loss(model, batch):
    graph = Whole(batch["edges"], len(batch["y"]))
    return training_loss(model, batch, graph) / batch["train"].sum()


def step(model, batch):
    graph = Partition(batch["edges"], dist.get_rank())
    count = batch["train"].sum()
    dist.all_reduce(count)
    value = training_loss(model, batch, graph) / count
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return value.detach()


def split(batch, mesh):
    rank = mesh.get_local_rank("part")
    own = {name: batch[name].split(NODES)[rank] for name in ("x", "y", "train")}
    return {**own, "edges": batch["edges"]}


generator = torch.Generator().manual_seed(5084)


def graph():
    count = sum(NODES)
    links = torch.rand(count, count, generator=generator) < 0.15
    return {
        "x": torch.randn(count, FEATURES, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, CLASSES, (count,), generator=generator),
        "edges": (links | links.T).fill_diagonal_(False).nonzero().T.contiguous(),
        "train": torch.arange(count) % 3 != 1,
    }


def without_last_part(batch):
    batch["train"][-NODES[-1] :] = False
    return batch


batches = [without_last_part(graph()) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"part": 3},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
