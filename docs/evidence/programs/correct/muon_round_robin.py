"""Muon under DDP: each rank computes the updates of some matrices, then broadcasts them.

Thread: https://github.com/nil0x9/flash-muon/issues/7 (how Muon's updates are shared between GPUs),
2025-09-25.
Right: matrix i is orthogonalized on rank i % world_size; a broadcast spreads the update. Momentum
buffers exist only on a matrix's rank.
Must not be accused: optimizer state that a rank lacks, or an update that a rank did not compute.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.size(0) > g.size(1) else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.size(0) > g.size(1) else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        world, rank = 1, 0
        if dist.is_initialized():
            world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (-len(params) % world)
            for base in range(0, len(params), world):
                update = torch.zeros(1)
                if base + rank < len(params):
                    p = params[base + rank]
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    buf = state["momentum_buffer"]
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    g = p.grad.lerp(buf, group["momentum"])
                    update = newton_schulz(g) if g.ndim == 2 else g
                for owner in range(min(world, len(params) - base)):
                    p = padded[base + owner]
                    received = update if owner == rank else torch.empty_like(p)
                    if world > 1:
                        dist.broadcast(received, owner)
                    p.add_(received, alpha=-group["lr"])


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)) for _ in range(2)
        )
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def build():
    return DDP(Model())


generator = torch.Generator().manual_seed(12)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", optimizer=Muon)
    print(titanlite.compare(Model, build, **options))
