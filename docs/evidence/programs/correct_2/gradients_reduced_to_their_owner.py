"""ZeRO-2 with whole parameters: each gradient is reduced to one rank and freed on the others.

Thread: https://github.com/karpathy/llm.c/pull/421 "Zero update" (only one shard of the reduced gradients
is needed on each rank), 2024-05-16.
Right: parameter i belongs to rank i % world_size, which gets the average, updates it and broadcasts it.
Must not be accused: gradients and optimizer state that a rank lacks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite


class Gpt2(nn.Module):
    def __init__(self, vocab=21, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.fc, self.proj = nn.Linear(dim, 36), nn.Linear(36, dim)
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, ids):
        x = self.wte(ids)
        x = x + self.proj(torch.nn.functional.gelu(self.fc(x)))
        return self.ln_f(x) @ self.wte.weight.t()


class MultiGpuConfig:
    def __init__(self, params):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def is_mine(self, index):
        return index % self.world == self.rank

    def reduce_gradients(self):
        for i, p in enumerate(self.params):
            dist.reduce(p.grad, i % self.world)
            p.grad = p.grad / self.world if self.is_mine(i) else None


class ZeroAdamW(torch.optim.AdamW):
    def __init__(self, config):
        self.config = config
        mine = [p for i, p in enumerate(config.params) if config.is_mine(i)]
        super().__init__(mine, lr=3e-3, weight_decay=0.1)

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for i, p in enumerate(self.config.params):
            dist.broadcast(p, i % self.config.world)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def loss(model, batch):
    return cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def build():
    model = Gpt2()
    config = MultiGpuConfig(model.parameters())
    return model, config, ZeroAdamW(config)


def step(built, batch):
    model, config, _ = built
    value = loss(model, batch)
    value.backward()
    config.reduce_gradients()
    return value


generator = torch.Generator().manual_seed(421)
batches = [
    {name: torch.randint(21, (4, 6), generator=generator) for name in ("inputs", "targets")}
    for _ in range(4)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Gpt2, build, optimizer=adamw, **options))
