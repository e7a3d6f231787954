"""Dense and global momentum contrast of histology tiles under DDP; keys are shuffled over the ranks as in MoCo.

Thread: CoinCheung/DenseCL issue #1 "an issue about shuffling BN" (2021): "I think 'dense_k' and 'feat_k' also need to
be unshuffled back. Is that right?" "Yes, it is my fault."
Fault: DenseContrast.forward encodes the key images in shuffled order and brings only the global keys back to their
ranks and rows; the dense keys and the key feature map stay shuffled, so the dense term matches the patches of a query
tile with those of some other tile.
REPAIR: `k = self.restore(k, order)` -> `k, dense_k, feat_k = [self.restore(x, order) for x in (k, dense_k, feat_k)]`
A right first sentence says: dense_k and feat_k aren't unshuffled after the shuffled forward pass of the key encoder
(only the global keys are), so dense positives come from other images than the queries and the dense loss is wrong.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

WIDTH, DIM, SIDE, ROWS = 12, 8, 8, 8
QUEUE, MOMENTUM, TEMPERATURE, DENSE_WEIGHT = 8, 0.9, 0.2, 0.5


class Encoder(nn.Module):
    """A feature map, a projection of its mean and a projection of every place in it."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, stride=2, padding=1),
            nn.GroupNorm(3, WIDTH),
            nn.GELU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, DIM))
        self.dense_head = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 1), nn.GELU(), nn.Conv2d(WIDTH, DIM, 1)
        )

    def forward(self, images):
        features = self.backbone(images)
        pooled = self.head(features.mean((2, 3)))
        dense = self.dense_head(features).flatten(2)
        return tuple(F.normalize(x, dim=1) for x in (pooled, dense, features.flatten(2)))


class DenseContrast(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, self.generator = group, torch.Generator().manual_seed(7)
        self.encoder_q = Encoder()
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        start = torch.randn(2, QUEUE, DIM, generator=torch.Generator().manual_seed(8))
        self.register_buffer("queue", F.normalize(start, dim=-1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def gather(self, x):
        if self.group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts)

    def own_rows(self, x):
        if self.group is None:
            return x
        return x.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]

    def shuffle(self, x):
        """Rows of all ranks in a random order, the same on every rank."""
        if self.group is None:
            return x, torch.arange(len(x))
        x = self.gather(x)
        order = torch.randperm(len(x), generator=self.generator)
        return self.own_rows(x[order]), order

    def restore(self, x, order):
        return self.own_rows(self.gather(x)[order.argsort()])

    @torch.no_grad()
    def update_key_encoder(self):
        for k, q in zip(self.encoder_k.parameters(), self.encoder_q.parameters()):
            k.mul_(MOMENTUM).add_(q, alpha=1 - MOMENTUM)

    @torch.no_grad()
    def enqueue(self, k, dense_k):
        keys = torch.stack([self.gather(k), self.gather(F.normalize(dense_k.mean(2), dim=1))])
        start = int(self.pointer)
        self.queue[:, start : start + keys.size(1)] = keys
        self.pointer.fill_((start + keys.size(1)) % QUEUE)

    def contrast(self, positive, query, queue):
        logits = torch.cat([positive.unsqueeze(-1), query @ queue.T], dim=-1) / TEMPERATURE
        return F.cross_entropy(logits.flatten(0, -2), logits.new_zeros(positive.numel()).long())

    def forward(self, queries, keys):
        q, dense_q, feat_q = self.encoder_q(queries)
        with torch.no_grad():
            self.update_key_encoder()
            keys, order = self.shuffle(keys)
            k, dense_k, feat_k = self.encoder_k(keys)
            k = self.restore(k, order)
            match = (feat_q.transpose(1, 2) @ feat_k).argmax(2)
            matched = dense_k.gather(2, match.unsqueeze(1).expand_as(dense_q))
        queue = self.queue.clone()
        value = self.contrast((q * k).sum(1), q, queue[0])
        dense = self.contrast((dense_q * matched).sum(1), dense_q.transpose(1, 2), queue[1])
        self.enqueue(k, dense_k)
        return (1 - DENSE_WEIGHT) * value + DENSE_WEIGHT * dense


def plain():
    return DenseContrast()


def parallel(mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(DenseContrast(group), process_group=group), group


def loss(model, batch):
    return model(batch["query"], batch["key"])


def step(built, batch):
    model, group = built
    value = model(batch["query"], batch["key"])
    value.backward()
    reported = value.detach().clone()
    dist.all_reduce(reported, group=group)
    return reported / dist.get_world_size(group)


generator = torch.Generator().manual_seed(41)


def tiles():
    tile = torch.randn(ROWS, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, ROWS, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return {"query": tile + 0.3 * noise[0], "key": tile.flip(3) + 0.3 * noise[1]}


batches = [tiles() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
