"""Full-graph training of a GCN on a directed graph: each rank holds a part of the nodes and the edges that end there.

Thread: dmlc/dgl pull request #2918 "[Distributed] add distributed in-degree and out-degree" (2021), which "fixes the issue that
the out-degree computed from the partitioned graph is incorrect": a partition has all in-edges of its nodes, but only some
out-edges.
Fault: PartitionedGCN counts the out-degrees of all nodes from the edges of its own partition, so the normalization of a source
node differs from rank to rank and is too weak; the in-degrees are right.
REPAIR: `out_degree = torch.bincount(source, minlength=NODES)` -> `out_degree = total(torch.bincount(source, minlength=NODES))`
A right first sentence says: the forward pass is wrong from the first convolution on, because the out-degrees that normalize the
source nodes are counted from the rank's own edges and are not summed over the ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

NODES, EDGES, FEATURES, WIDTH, CLASSES, RANKS = 18, 60, 6, 12, 4, 3
ROWS = NODES // RANKS


def inverse_root(degree):
    return degree.clamp(min=1).to(torch.float64).rsqrt()[:, None]


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, sources, edges, out_norm, in_norm):
        source, target = edges
        messages = (sources * out_norm)[source]
        summed = messages.new_zeros(in_norm.size(0), messages.size(1))
        return (summed.index_add(0, target, messages) * in_norm) @ self.weight + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(GraphConv(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.classify = nn.Linear(WIDTH, CLASSES)

    def forward(self, features, edges):
        source, target = edges
        out_norm = inverse_root(torch.bincount(source, minlength=NODES))
        in_norm = inverse_root(torch.bincount(target, minlength=NODES))
        h = F.relu(self.encode(features))
        for conv, norm in zip(self.convs, self.norms):
            h = h + F.relu(norm(conv(h, edges, out_norm, in_norm)))
        return self.classify(h)


class AllNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        parts = [torch.empty_like(h) for _ in range(RANKS)]
        dist.all_gather(parts, h.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(RANKS)[dist.get_rank()]


def total(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


class PartitionedGCN(GCN):
    def forward(self, features, edges):
        source, target = edges
        target = target - dist.get_rank() * ROWS
        out_degree = torch.bincount(source, minlength=NODES)
        in_degree = torch.bincount(target, minlength=ROWS)
        out_norm, in_norm = inverse_root(out_degree), inverse_root(in_degree)
        h = F.relu(self.encode(features))
        for conv, norm in zip(self.convs, self.norms):
            y = conv(AllNodes.apply(h), (source, target), out_norm, in_norm)
            h = h + F.relu(norm(y))
        return self.classify(h)


def plain():
    return GCN()


def parallel(mesh):
    return PartitionedGCN()


def loss(model, batch):
    logits = model(batch["features"], batch["edges"])
    return F.cross_entropy(logits, batch["labels"], ignore_index=-1)


def step(model, batch):
    logits, labels = model(batch["features"], batch["edges"]), batch["labels"]
    value = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
    value = value / total((labels >= 0).sum())
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return value.detach()


def split(batch, mesh):
    rank = mesh.get_local_rank("part")
    edges = batch["edges"]
    return {
        "features": batch["features"].chunk(RANKS)[rank],
        "labels": batch["labels"].chunk(RANKS)[rank],
        "edges": edges[:, edges[1] // ROWS == rank],
    }


generator = torch.Generator().manual_seed(2918)


def snapshot():
    labels = torch.randint(0, CLASSES, (NODES,), generator=generator)
    labels[torch.rand(NODES, generator=generator) < 0.3] = -1
    return {
        "features": torch.randn(NODES, FEATURES, generator=generator, dtype=torch.float64),
        "labels": labels,
        "edges": torch.randint(0, NODES, (2, EDGES), generator=generator),
    }


batches = [snapshot() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split=split, ranks={"part": RANKS})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
