"""ZeRO-1 by hand: flat padded gradients are reduce-scattered, each rank updates its slice.

Thread: https://github.com/xrsrke/pipegoose/issues/20 "ZeRO-1", 2023-10-25.
Right: all parameters are one padded vector. The optimizer reduce-scatters the gradients (mean),
updates the rank's slice with AdamW, and all-gathers the weights.
Must not be accused: gradients that are local until the optimizer reduces them; optimizer state for a
slice of the flat vector; weights that change on all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite


class Zero1(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.numel = sum(p.numel() for p in self.params)
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.padding = -self.numel % self.world
        flat = self.flatten([p.data for p in self.params])
        self.shard = nn.Parameter(flat.chunk(self.world)[self.rank].clone())
        self.inner = torch.optim.AdamW([self.shard], lr=lr)

    def flatten(self, tensors):
        flat = torch.cat([t.reshape(-1) for t in tensors])
        return torch.cat([flat, flat.new_zeros(self.padding)])

    @torch.no_grad()
    def step(self):
        grads = self.flatten([p.grad for p in self.params])
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, grads)
        self.shard.grad /= self.world
        self.inner.step()
        flat = torch.empty_like(grads)
        dist.all_gather_into_tensor(flat, self.shard.data)
        pieces = flat[: self.numel].split([p.numel() for p in self.params])
        for p, piece in zip(self.params, pieces):
            p.copy_(piece.view_as(p))


class Model(nn.Module):
    def __init__(self, vocab=21, dim=15):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 33), nn.GELU(), nn.Linear(33, dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(x))


def build():
    model = Model()
    return model, Zero1(model.parameters())


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(15)
batches = [
    {name: torch.randint(21, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Model, build, **options))
