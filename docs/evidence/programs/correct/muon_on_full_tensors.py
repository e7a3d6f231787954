"""Muon under FSDP2 that gathers each matrix before it is orthogonalized.

Thread: https://github.com/MoonshotAI/Moonlight/issues/27 "[Bug] zeropower_via_newtonschulz5 will get
-inf value when using torch FSDP", the solution in a comment of 2025-04-18.
Right: update.full_tensor() is orthogonalized on every rank; each applies its own shard of the result.
Must not be accused: the optimizer, which works on DTensors and redistributes.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy

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
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buf = state["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(p.grad)
                update = p.grad.add(buf, alpha=group["momentum"])
                if update.ndim == 2:
                    sharded = isinstance(update, DTensor)
                    whole = update.full_tensor() if sharded else update
                    whole = newton_schulz(whole) * 0.2 * max(whole.shape) ** 0.5
                    update = whole
                    if sharded:
                        update = distribute_tensor(whole, p.device_mesh, p.placements)
                p.add_(update, alpha=-group["lr"])


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


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


generator = torch.Generator().manual_seed(12)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", optimizer=Muon)
    print(titanlite.compare(Model, parallel, **options))
