"""Muon on FSDP2: the momentum is orthogonalized as a whole, but the update is scaled by the shape of the shard.

Thread: MoonshotAI/Moonlight issue #27 (Muon with torch FSDP, 2025) and issue #31 "a question about scale update" (2025:
which tensor's shape adjust_lr takes), and KellerJordan/Muon pull request #60 "Fix the adjusted lr" (2025).
Wrong: the scale 0.2 * sqrt(max(rows, columns)) is that of the local shard. A weight with more rows than columns, cut
over the rows, has half as many there, so its update is too small by sqrt(2).
PLACE: the optimizer step (Muon.step), weights with more rows than columns: blocks.*.up.weight, embed.weight, head.weight
KIND: Muon's update scale from the shape of the local shard instead of the whole matrix
REPAIR: `max(local.shape)` -> `max(p.shape)`
EXPECT: loss and gradients of step 1 agree, the weights after the optimizer step do not: blocks.*.up.weight, embed.weight
and head.weight, all with more rows than columns, get updates too small by sqrt(2), on all ranks; blocks.*.down.weight and
the vectors agree. The scale is sqrt of the larger side of the shard, not of the whole matrix.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.down(torch.relu(self.up(self.norm(x + past))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def orthogonalize(g, steps=5):
    """Newton-Schulz iteration."""
    x = g / g.norm()
    x = x.t() if g.shape[0] > g.shape[1] else x
    for _ in range(steps):
        a = x @ x.t()
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.t() if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Moonlight's Muon for matrices, and momentum SGD for vectors; parameters may be DTensors."""

    def __init__(self, params, lr=2e-3, momentum=0.95, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                update = buffer
                if p.ndim == 2:
                    update = self.matrix_update(p, buffer)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])

    def matrix_update(self, p, buffer):
        local = p.to_local() if isinstance(p, DTensor) else p
        scale = 0.2 * max(local.shape) ** 0.5
        if not isinstance(p, DTensor):
            return scale * orthogonalize(buffer)
        whole = scale * orthogonalize(buffer.full_tensor())
        return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


generator = torch.Generator().manual_seed(116)


def draw():
    return torch.randint(VOCAB, (8, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", optimizer=Muon)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
