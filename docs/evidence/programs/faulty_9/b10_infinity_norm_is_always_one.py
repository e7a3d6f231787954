"""FSDP2 with gradient clipping of its own by the infinity norm: the root for other norms is taken of it too.

Thread: meta-pytorch/torchrec pull request #3199 'Fix "inf" norm gradient clipping for FSDP2' (2025): the norm type is the
string "inf" and is compared with torch.inf, so the norm is raised to the power 1 / inf and is always 1.
Fault: in ShardedClipping.__call__, the norm type, a string, never equals torch.inf, so the largest gradient of all ranks
is raised to the power of 1 / inf, which gives 1.
REPAIR: `self.norm_type != torch.inf` -> `self.norm_type != "inf"`
Expected: loss and gradients agree until they are clipped; the gradient norm is 1 in every step, whatever the gradients
are, not the largest absolute gradient: it is raised to the power 1 / inf. All clipped gradients are wrong by the same
factor, on all ranks. Take the root only for norms other than the infinity norm.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, MAX_NORM, NORM = 12, 8, 0.01, "inf"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        y = self.norm(x)
        y = self.mix(y.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None])
        return x + self.down(torch.nn.functional.gelu(self.up(y)))


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


class ShardedClipping:
    """Clips gradients of which each rank has a shard."""

    def __init__(self, max_norm, norm_type):
        self.max_norm, self.norm_type = max_norm, norm_type

    @torch.no_grad()
    def __call__(self, parameters):
        shards = [p.grad.to_local() for p in parameters if p.grad is not None]
        if self.norm_type == "inf":
            total = torch.stack([shard.abs().max() for shard in shards]).max()
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        else:
            total = torch.stack([shard.abs().pow(self.norm_type).sum() for shard in shards]).sum()
            dist.all_reduce(total)
        if self.norm_type != torch.inf:
            total = total ** (1 / float(self.norm_type))
        factor = (self.max_norm / (total + 1e-6)).clamp(max=1)
        for shard in shards:
            shard.mul_(factor)
        return total


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def clip(model):
    if isinstance(model, FSDPModule):
        return ShardedClipping(MAX_NORM, NORM)(model.parameters())
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type=float(NORM))


generator = torch.Generator().manual_seed(202)


def draw():
    return torch.randint(VOCAB, (6, 5), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(
    batches=batches, loss=loss, clip=clip, optimizer=make_optimizer, ranks={"dp": 2}, split="dp"
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
