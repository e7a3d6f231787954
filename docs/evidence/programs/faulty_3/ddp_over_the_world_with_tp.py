"""Tensor parallelism inside DDP, which is given no process group.

Thread: https://github.com/NVIDIA/physicsnemo/issues/235 "[FEA]: Add a wrapper class for shared tensors in model
parallel implementations", 2023-11-16 (DDP has to get the data-parallel group, orthogonal to the
model-parallel one).
Wrong: DDP works over all four ranks. Its constructor overwrites every rank's shards with those of rank 0, and
it would average the shards' gradients over tp.
A right diagnosis says: the starting weights of fc1 and fc2 differ on the ranks with tp 1: they are the shards
of tp 0 (DDP broadcast them over all ranks instead of over dp).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

FIELDS, LATENT, HIDDEN = 6, 16, 32


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class DistributedMLP(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, n = group, 1 if group is None else group.size()
        self.fc1, self.fc2 = nn.Linear(LATENT, HIDDEN // n), nn.Linear(HIDDEN // n, LATENT, False)

    def forward(self, x):
        if self.group is None:
            return self.fc2(gelu(self.fc1(x)))
        return Reduce.apply(self.fc2(gelu(self.fc1(Copy.apply(x, self.group)))), self.group)


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FIELDS, LATENT), nn.Linear(LATENT, FIELDS)
        self.norm, self.mlp = nn.LayerNorm(LATENT), DistributedMLP()

    def forward(self, x):
        x = self.encoder(x)
        return self.decoder(x + self.mlp(self.norm(x)))


def shard_of(name):
    return {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}.get(name.removeprefix("mlp."))


def shard(name):
    return None if shard_of(name) is None else (shard_of(name), "model_parallel")


def distribute(mesh):
    model, group = Surrogate(), mesh.get_group("model_parallel")
    whole, model.mlp = model.mlp, DistributedMLP(group)
    for name, p in model.mlp.named_parameters():
        dim = shard_of(name)
        p.data = whole.get_parameter(name).data.chunk(group.size(), dim)[group.rank()].clone()
    return DDP(model)


def loss(model, batch):
    return mse_loss(model(batch["fields"]), batch["next"])


generator = torch.Generator().manual_seed(235)
batches = [
    {name: torch.randn(4, 5, FIELDS, generator=generator) for name in ("fields", "next")}
    for _ in range(3)
]

if __name__ == "__main__":
    axes = {"data_parallel": 2, "model_parallel": 2}
    options = dict(batches=batches, loss=loss, ranks=axes, split="data_parallel", shard=shard)
    print(titanlite.compare(Surrogate, distribute, **options))
