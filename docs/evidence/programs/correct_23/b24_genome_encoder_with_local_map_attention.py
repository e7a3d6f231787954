"""An encoder of DNA sequences whose length is cut over the ranks as DTensors, with attention in a local_map.

Thread: meta-pytorch/autoparallel pull request #512 "Support context-parallel local_map in AutoParallel" (2026): keys
and values are replicated for the attention kernel, but their gradients are partial, which in_grad_placements tells.
Correct: attention runs on local tensors in a local_map that gathers keys and values, and its own queries' gradients
reach these keys and values from each rank only in part; in_grad_placements calls them Partial, and the redistribution
back to shards of the length adds them up. All parameters are replicated DTensors and their gradients stay Partial
until the optimizer reads them. There is no mask, so no rank has to know where its shard begins; the positions are cut
in the same way as the sequence, and the mean over equal shards is the mean over all bases.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import local_map

import titanlite

BASES, WIDTH, HEADS, LENGTH, LAYERS, ROWS, TRACKS = 5, 16, 4, 24, 2, 3, 2
SEQUENCE = 1


def attention(q, k, v):
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v)
    return y.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attention = attention

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.out(self.attention(self.q(y), self.k(y), self.v(y)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GenomeEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bases = nn.Linear(BASES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.tracks = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TRACKS)

    def forward(self, sequence, positions):
        x = self.bases(sequence) + positions
        for layer in self.layers:
            x = layer(x)
        return self.tracks(self.norm(x))


def sequence_attention(mesh):
    """Attention of a rank's queries to the keys and values of all ranks."""
    cut, whole, partial = [Shard(SEQUENCE)], [Replicate()], [Partial()]
    return local_map(
        attention,
        out_placements=cut,
        in_placements=(cut, whole, whole),
        in_grad_placements=(cut, partial, partial),
        device_mesh=mesh,
        redistribute_inputs=True,
    )


def coverage_loss(model, batch):
    """Negative log-likelihood of the read counts in every track, Poisson without its constant."""
    rates = model(batch["sequence"], batch["positions"])
    return (rates.exp() - batch["counts"] * rates).mean()


class SequenceParallelTrainer:
    def __init__(self, model, mesh):
        self.model, self.mesh = model, mesh
        for layer in model.layers:
            layer.attention = sequence_attention(mesh)

    def training_step(self, batch):
        cut = {k: distribute_tensor(v, self.mesh, [Shard(SEQUENCE)]) for k, v in batch.items()}
        value = coverage_loss(self.model, cut)
        value.backward()
        return value.detach().full_tensor()


def plain():
    return GenomeEncoder()


def parallel(mesh):
    model = distribute_module(GenomeEncoder(), mesh["sp"])
    return model, SequenceParallelTrainer(model, mesh["sp"])


def loss(model, batch):
    return coverage_loss(model, batch)


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(512)
angles = torch.arange(LENGTH).unsqueeze(1) / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
waves = torch.cat([angles.sin(), angles.cos()], dim=1).to(torch.float64)


def windows():
    bases = torch.randint(0, BASES, (ROWS, LENGTH), generator=generator)
    counts = torch.rand(ROWS, LENGTH, TRACKS, generator=generator, dtype=torch.float64) * 3
    return {
        "sequence": F.one_hot(bases, BASES).to(torch.float64),
        "positions": waves.expand(ROWS, LENGTH, WIDTH).contiguous(),
        "counts": counts.floor(),
    }


batches = [windows() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"sp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
