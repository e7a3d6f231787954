"""Pretraining under FSDP2 with an optimizer that, like MuonClip, shrinks query and key weights after large logits.

Thread: modelscope/ms-swift pull request #9901 "Synchronize MuonClip max logits across ranks" (2026): the largest logit is
tracked per process and used directly, so data parallel ranks clip with factors of their own.
Fault: ClippedAdamW.step takes the largest logit that this rank's rows produced; every rank scales its shard of the query and key
weights by another factor, and none by that of the whole batch except the rank where the largest logit occurred.
REPAIR: `peak = tracker.peak` -> `peak = largest_over(tracker.peak, p)`
A right first sentence says: the maximum attention logit behind the QK-clip factor isn't reduced (MAX) over the data parallel
ranks, so each rank scales its shards of the query and key weights by a factor from its own batch rows.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, ROWS, THRESHOLD = 20, 16, 2, 9, 2, 6, 0.4


class LogitTracker:
    """The largest attention logit since the last step of the optimizer."""

    def __init__(self):
        self.peak = torch.tensor(-torch.inf)

    def see(self, logits):
        self.peak = torch.maximum(self.peak, logits.detach().max())

    def reset(self):
        self.peak = torch.tensor(-torch.inf)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tracker = LogitTracker()

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        logits = q @ k.mT * (WIDTH // HEADS) ** -0.5
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        logits = logits.masked_fill(future, -torch.inf)
        self.tracker.see(logits)
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.relu(self.up(self.norm_2(x))).square())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def largest_over(value, parameter):
    value = value.clone()
    if isinstance(parameter, DTensor):
        group = parameter.device_mesh.get_group()
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


def track(model):
    """Tells the optimizer whose logits belong to which weights."""
    for block in model.blocks:
        attention = block.attention
        for layer in (attention.query, attention.key):
            layer.weight.tracker = attention.tracker
    return model


class ClippedAdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        clipped = [
            (p, p.tracker)
            for group in self.param_groups
            for p in group["params"]
            if hasattr(p, "tracker")
        ]
        for p, tracker in clipped:
            peak = tracker.peak
            if peak > THRESHOLD:
                p.mul_((THRESHOLD / peak).sqrt().item())
        for _, tracker in clipped:
            tracker.reset()


def plain():
    return track(Decoder())


def parallel(mesh):
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return track(fully_shard(model, mesh=mesh["dp"]))


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


generator = torch.Generator().manual_seed(9901)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: ClippedAdamW(parameters, lr=2e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
