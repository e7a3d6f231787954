"""ZeRO-1 with one flat buffer, padded to a multiple of the number of ranks, whose cuts go through parameters.

Thread: of the kind "how does the distributed optimizer partition parameters across bucket boundaries" (Megatron-LM's
DistributedOptimizer, DeepSpeed's flatten_dense_tensors_aligned), 2021 to 2024.
Correct: gradients are averaged in step. The optimizer updates the rank's third of the flat weights, and gathers all
thirds into the parameters. The padding is cut off.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import titanlite


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 11), nn.Linear(11, 7), nn.Linear(7, 4)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class FlatAdamW(torch.optim.AdamW):
    def __init__(self, model, group, **options):
        self.all, self.group = list(model.parameters()), group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.shard = nn.Parameter(self.piece(parameters_to_vector(self.all).detach()).clone())
        super().__init__([self.shard], **options)

    def piece(self, flat):
        padding = -len(flat) % self.size
        return nn.functional.pad(flat, (0, padding)).chunk(self.size)[self.rank]

    def zero_grad(self, set_to_none=True):
        for p in self.all:
            p.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        self.shard.grad = self.piece(torch.cat([p.grad.flatten() for p in self.all])).clone()
        super().step(closure)
        pieces = [torch.empty_like(self.shard) for _ in range(self.size)]
        dist.all_gather(pieces, self.shard.detach(), group=self.group)
        count = sum(p.numel() for p in self.all)
        vector_to_parameters(torch.cat(pieces)[:count], self.all)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model, group = Model(), mesh.get_group("dp")
    return model, FlatAdamW(model, group, lr=1e-3), group


def step(built, batch):
    model, _, group = built
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)
    return value


generator = torch.Generator().manual_seed(38)
batches = [
    {"x": torch.randn(9, 5, generator=generator), "y": torch.randn(9, 4, generator=generator)}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 3}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
