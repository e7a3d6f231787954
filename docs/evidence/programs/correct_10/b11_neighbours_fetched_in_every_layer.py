"""A graph attention network whose nodes are cut unevenly over two ranks; every layer fetches the others' features.

Thread: of the kind dmlc/dgl issue #5084 "[RFC] Add support for distributed full-graph training and inference" (2022) and
issue #2667 "Are HALO nodes evaluated?" (2021).
Correct: a node's incoming edges are all on its own rank, so its softmax is complete there; features that others read get
their gradients back in the gather's backward pass. Each loss is the sum over own nodes, divided by all nodes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, elu, leaky_relu

import titanlite

NODES, OWN, FEATURES, HEADS, WIDTH, CLASSES = 12, (7, 5), 4, 2, 3, 3


class FetchAll(torch.autograd.Function):
    """All nodes' rows; each rank has another number of them."""

    @staticmethod
    def forward(ctx, x):
        whole = x.new_zeros(NODES, *x.shape[1:])
        whole.split(OWN)[dist.get_rank()].copy_(x)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.split(OWN)[dist.get_rank()]


class GatConv(nn.Module):
    distributed = False

    def __init__(self, inputs):
        super().__init__()
        self.project = nn.Linear(inputs, HEADS * WIDTH, bias=False)
        self.source, self.target = (
            nn.Linear(HEADS * WIDTH, HEADS),
            nn.Linear(HEADS * WIDTH, HEADS, bias=False),
        )
        self.skip = nn.Linear(inputs, HEADS * WIDTH)

    def forward(self, x, edges):
        own = self.project(x)
        everyone = FetchAll.apply(own) if self.distributed else own
        scores = leaky_relu(self.target(own)[:, None] + self.source(everyone)[None], 0.2)
        weights = scores.masked_fill(edges[..., None] == 0, -torch.inf).softmax(1)
        y = torch.einsum("ijh,jhw->ihw", weights, everyone.unflatten(1, (HEADS, WIDTH)))
        return y.flatten(1) + self.skip(x)


class Gat(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GatConv(FEATURES), GatConv(HEADS * WIDTH)
        self.classify = nn.Linear(HEADS * WIDTH, CLASSES)

    def forward(self, x, edges):
        return self.classify(elu(self.conv2(elu(self.conv1(x, edges)), edges)))


def loss(model, batch):
    return cross_entropy(model(batch["x"], batch["edges"]), batch["y"], reduction="sum") / NODES


def own_nodes(batch, mesh):
    return {key: value.split(OWN)[mesh.get_rank()] for key, value in batch.items()}


def parallel(mesh):
    model = Gat()
    model.conv1.distributed = model.conv2.distributed = True
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return value


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


rng = torch.Generator().manual_seed(328)


def draw():
    edges = (torch.rand(NODES, NODES, generator=rng) < 0.3).long()
    return {
        "x": torch.randn(NODES, FEATURES, generator=rng),
        "edges": edges.fill_diagonal_(1),
        "y": torch.randint(CLASSES, (NODES,), generator=rng),
    }


batches = [draw() for _ in range(3)]
arguments = Gat, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split=own_nodes)
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
