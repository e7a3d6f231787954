"""A graph attention network where all ranks hold all nodes, and the edges are dealt out to the ranks in turn.

Might be accused: no gradient of a parameter is ever reduced, though each rank sees other edges, and not equally many; the softmax over
the edges of a node is computed from parts; the loss isn't scaled, and all ranks compute the same one.
Correct because: the parameters only act on node tensors, which are alike on all ranks. These enter the work on the edges through
IntoEdges, whose backward pass sums the ranks' gradients, and the sums per node leave it through OutOfEdges, whose backward pass is
the identity; so the gradients of all node tensors, and of all parameters, are whole on every rank. The softmax divides the summed
messages by the summed weights of all ranks' edges, with the largest score of all of a node's edges subtracted.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

NODES, FEATURES, HEADS, WIDTH, CLASSES = 20, 6, 2, 5, 3


class IntoEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class OutOfEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class WholeGraph:
    """All edges are here."""

    def enter(self, x):
        return x

    def leave(self, x):
        return x

    def largest(self, x):
        return x


class DealtEdges(WholeGraph):
    def enter(self, x):
        return IntoEdges.apply(x)

    def leave(self, x):
        return OutOfEdges.apply(x)

    def largest(self, x):
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x


class GraphAttention(nn.Module):
    def __init__(self, inputs, edges):
        super().__init__()
        self.edges = edges
        self.project = nn.Linear(inputs, HEADS * WIDTH, bias=False)
        self.sender = nn.Parameter(torch.randn(HEADS, WIDTH) * 0.3)
        self.receiver = nn.Parameter(torch.randn(HEADS, WIDTH) * 0.3)

    def largest(self, scores, target):
        index = target.unsqueeze(-1).expand_as(scores)
        most = scores.new_full((NODES, HEADS), -1e9)
        most = most.scatter_reduce(0, index, scores.detach(), "amax")
        return self.edges.largest(most)

    def forward(self, x, edge_index):
        source, target = edge_index
        nodes = self.project(x).view(-1, HEADS, WIDTH)
        sent = self.edges.enter((nodes * self.sender).sum(-1))
        received = self.edges.enter((nodes * self.receiver).sum(-1))
        values = self.edges.enter(nodes)

        scores = F.leaky_relu(sent[source] + received[target], 0.2)
        weights = (scores - self.largest(scores, target)[target]).exp()
        messages = values[source] * weights.unsqueeze(-1)
        total = self.edges.leave(weights.new_zeros(NODES, HEADS).index_add(0, target, weights))
        summed = self.edges.leave(torch.zeros_like(nodes).index_add(0, target, messages))
        return (summed / total.unsqueeze(-1)).flatten(1)


class Gat(nn.Module):
    def __init__(self, edges):
        super().__init__()
        self.layer1 = GraphAttention(FEATURES, edges)
        self.layer2 = GraphAttention(HEADS * WIDTH, edges)
        self.skip = nn.Linear(FEATURES, HEADS * WIDTH)
        self.norm = nn.BatchNorm1d(HEADS * WIDTH)
        self.head = nn.Linear(HEADS * WIDTH, CLASSES)

    def forward(self, x, edge_index):
        h = F.elu(self.norm(self.layer1(x, edge_index)))
        h = F.elu(self.layer2(h, edge_index) + self.skip(x))
        return self.head(h)


def plain():
    return Gat(WholeGraph())


def parallel(mesh):
    return Gat(DealtEdges())


def loss(model, batch):
    logits = model(batch["features"], batch["edge_index"])
    known = batch["known"]
    return F.cross_entropy(logits[known], batch["labels"][known])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    return value.detach()


def split(batch, mesh):
    rank, world = mesh.get_local_rank("edges"), mesh["edges"].size()
    return batch | {"edge_index": batch["edge_index"][:, rank::world]}


generator = torch.Generator().manual_seed(20)


def graph(edges=70):
    """Random edges, and one from each node to itself, so that every node receives something."""
    random = torch.randint(0, NODES, (2, edges), generator=generator)
    loops = torch.arange(NODES).repeat(2, 1)
    return {
        "features": torch.randn(NODES, FEATURES, generator=generator, dtype=torch.float64),
        "edge_index": torch.cat([random, loops], dim=1),
        "labels": torch.randint(0, CLASSES, (NODES,), generator=generator),
        "known": torch.rand(NODES, generator=generator) < 0.6,
    }


batches = [graph() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"edges": 4},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3, weight_decay=5e-4),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
