"""Clipping of sharded gradients by the largest of the ranks' norms.

Thread: https://github.com/facebookresearch/fairscale/pull/167 "[feat] OSS clip grads, bridge sharded
states", review of 2020-10-29.
Wrong: total_norm is the maximum of the shards' norms. It should be the root of the sum of their
squares.
A right diagnosis says: every gradient agrees, but the gradient norm is that of one rank's shards (the
largest) only: add the squares over dp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import titanlite


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.mlp(x)))


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_grad_norm(model, max_norm=0.2):
    grads = [local(p.grad) for p in model.parameters()]
    total_norm = torch.stack([grad.norm() for grad in grads]).norm()
    if dist.is_initialized():
        norms = [torch.zeros_like(total_norm) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, total_norm)
        total_norm = torch.max(torch.stack(norms))
    clip_coef = max_norm / (total_norm + 1e-6)
    if clip_coef < 1:
        for grad in grads:
            grad.mul_(clip_coef)
    return total_norm


def parallel(mesh):
    model = Model()
    fully_shard(model.mlp, mesh=mesh)
    return fully_shard(model, mesh=mesh)


generator = torch.Generator().manual_seed(5)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", clip=clip_grad_norm)
    print(titanlite.compare(Model, parallel, **options))
