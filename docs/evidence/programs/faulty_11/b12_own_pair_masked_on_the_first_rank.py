"""Supervised contrastive learning under DDP: each anchor is compared with the embeddings of all ranks, except with itself.

Thread: of the kind HobbitLong/SupContrast issue #26 "DistributedDataParallel" (2020), where features and labels are gathered with a
differentiable all_gather, and lightly-ai/lightly pull request #1877 "Start on SupCon loss #1554" (2025).
Fault: in supcon, the pair of an anchor with itself is looked for in the first columns, where rank 0's embeddings are, on all ranks.
REPAIR: `itself[own, own] = True` -> `itself[own, own + dist.get_rank() * len(z)] = True`
A right first sentence says: the embeddings (the model's outputs) agree, the loss is wrong on rank 1 only: its anchors are compared
with themselves, and a pair with an embedding of rank 0 is left out, since the mask of each anchor's own column in supcon has no
offset by rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import elu, normalize
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, WIDTH, CLASSES, TEMPERATURE = 7, 10, 3, 0.5


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ELU(), nn.LayerNorm(WIDTH))
        self.hidden, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x):
        x = self.backbone(x)
        return normalize(self.project(x + elu(self.hidden(x))), dim=-1)


def log_likelihood(z, every, positive, itself):
    similar = (z @ every.t() / TEMPERATURE).masked_fill(itself, -torch.inf)
    log_prob = similar - similar.logsumexp(1, keepdim=True)
    positive = positive & ~itself
    return log_prob.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)


def loss(model, batch):
    z, label = model(batch["x"]), batch["label"]
    same = label[:, None] == label
    return -log_likelihood(z, z, same, torch.eye(len(z), dtype=torch.bool)).mean()


def supcon(model, batch):
    z, label = model(batch["x"]), batch["label"]
    every, labels = GatherLayer.apply(z), GatherLayer.apply(label)
    own = torch.arange(len(z))
    itself = torch.zeros(len(z), len(every), dtype=torch.bool)
    itself[own, own] = True
    return -log_likelihood(z, every, label[:, None] == labels, itself).mean()


def parallel(mesh):
    return DistributedDataParallel(Encoder(), process_group=mesh.get_group("dp"))


rng = torch.Generator().manual_seed(413)
batches = [
    {
        "x": torch.randn(12, FEATURES, generator=rng),
        "label": (torch.arange(12) % CLASSES)[torch.randperm(12, generator=rng)],
    }
    for _ in range(3)
]
arguments = Encoder, parallel
options = dict(batches=batches, loss=loss, parallel_loss=supcon, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
