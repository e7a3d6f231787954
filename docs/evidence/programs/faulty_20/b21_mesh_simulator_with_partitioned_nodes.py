"""A mesh network that predicts the next velocities of a plate, with the nodes cut over the ranks; an edge lives with its sender.

Thread: NVIDIA/physicsnemo pull request #1914 "Compile-safe ShardTensor subclassing and domain-parallel halo scatter-correction"
(2026): what is scattered to the borrowed rows of a shard has to travel back and be added at the rank that owns them.
Fault: MeshLayer.forward adds the messages of the rank's own edges up for all nodes, and then keeps the rows of its own nodes
only; messages to a node of another rank are thrown away.
REPAIR: `received = sums.chunk(ranks, 1)[rank]` -> `received = dist_nn.all_reduce(sums, group=self.group).chunk(ranks, 1)[rank]`
A right first sentence says: the messages along edges that end at another rank's node are dropped after the aggregation instead
of being summed over the ranks, so nodes at the borders of the partition miss the messages of their neighbours elsewhere.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F

import titanlite

SIDE, FIELDS, WIDTH, LAYERS, PLATES = 4, 3, 8, 2, 3
NODES = SIDE * SIDE


def grid_edges():
    """Both directions of every edge of a square grid, as senders and receivers."""
    ids = torch.arange(NODES).view(SIDE, SIDE)
    right = torch.stack([ids[:, :-1].flatten(), ids[:, 1:].flatten()])
    down = torch.stack([ids[:-1].flatten(), ids[1:].flatten()])
    one_way = torch.cat([right, down], dim=1)
    return torch.cat([one_way, one_way.flip(0)], dim=1)


def mlp(inputs):
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))


class MeshLayer(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.message, self.update = mlp(2 * WIDTH), mlp(2 * WIDTH)

    def forward(self, x, edges):
        everywhere = x
        if self.group is not None:
            everywhere = torch.cat(dist_nn.all_gather(x.contiguous(), group=self.group), dim=1)
        senders, receivers = edges
        pairs = torch.cat([everywhere[:, senders], everywhere[:, receivers]], dim=-1)
        sums = received = torch.zeros_like(everywhere).index_add(1, receivers, self.message(pairs))
        if self.group is not None:
            ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            received = sums.chunk(ranks, 1)[rank]
        return x + self.update(torch.cat([x, received], dim=-1))


class PlateSimulator(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FIELDS, WIDTH), nn.Linear(WIDTH, FIELDS)
        self.layers = nn.ModuleList(MeshLayer(group) for _ in range(LAYERS))
        self.edges = grid_edges()
        if group is not None:
            owner = self.edges[0] // (NODES // dist.get_world_size(group))
            self.edges = self.edges[:, owner == dist.get_rank(group)]

    def forward(self, state):
        x = self.encoder(state)
        for layer in self.layers:
            x = layer(x, self.edges)
        return state + self.decoder(x)


def plain():
    return PlateSimulator()


def parallel(mesh):
    return PlateSimulator(mesh.get_group("nodes"))


def loss(model, batch):
    """The mean over all nodes; under a partition the part of the own nodes."""
    now, later = batch
    return F.mse_loss(model(now), later, reduction="sum") / (PLATES * NODES * FIELDS)


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


generator = torch.Generator().manual_seed(1914)


def plates():
    now = torch.randn(PLATES, NODES, FIELDS, generator=generator, dtype=torch.float64)
    senders, receivers = grid_edges()
    pulls = torch.zeros_like(now).index_add(1, receivers, now[:, senders] - now[:, receivers])
    return now, now + 0.2 * pulls


batches = [plates() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"nodes": 1},
    ranks={"nodes": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
