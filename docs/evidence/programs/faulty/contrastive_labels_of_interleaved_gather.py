"""In-batch negatives gathered over the ranks, with labels for another order than the gathered one.

Thread: https://github.com/huggingface/sentence-transformers/pull/3453 "[`fix`] Patch
`gather_across_devices` for in-batch negatives losses", 2025-07-21.
Wrong: positives and negatives are concatenated before the gather (P N P N), but the labels assume
all positives first (P P N N). The second rank's anchors are trained towards hard negatives.
A right diagnosis says: the model's outputs agree; the loss differs on rank 1 only: rank 1's labels
point at other rows of the gathered candidates.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class SentenceEncoder(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.dense = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, dim))

    def forward(self, tokens):
        return normalize(self.dense(self.embed(tokens)).mean(1), dim=-1)


def multiple_negatives_ranking_loss(model, batch, scale=20.0):
    columns = [batch["anchor"], batch["positive"], batch["negative"]]
    anchors, positives, negatives = model(torch.cat(columns)).chunk(3)
    candidates = torch.cat([positives, negatives])
    offset = 0
    if dist.is_initialized():
        candidates = torch.cat(dist_nn.all_gather(candidates))
        offset = dist.get_rank() * len(anchors)
    scores = scale * anchors @ candidates.t()
    labels = torch.arange(offset, offset + len(anchors))
    return cross_entropy(scores, labels)


def build():
    return DDP(SentenceEncoder())


generator = torch.Generator().manual_seed(4)
batches = [
    {
        name: torch.randint(40, (6, 5), generator=generator)
        for name in ("anchor", "positive", "negative")
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(
        batches=batches, loss=multiple_negatives_ranking_loss, ranks={"dp": 2}, split="dp"
    )
    print(titanlite.compare(SentenceEncoder, build, **options))
