"""A sentence encoder whose false negatives are masked by a guide model, with the candidates of all devices, under DDP.

Thread: huggingface/sentence-transformers pull request #3817 "[fix] Fix positive masking in GIST losses with
gather_across_devices" (2026): GISTEmbedLoss and CachedGISTEmbedLoss "build the positive-protection mask without the
cross-device `offset`, so on rank > 0 the wrong columns are protected".
Fault: the labels and the guide's threshold use the offset of the rank, the mask that protects the positives doesn't: on
the second rank it keeps the pairs (row, column row) of the first rank's positives, although the guide finds some of
them closer than the own positive and they should be masked as false negatives (and are, in one process).
REPAIR: `eye(*guided_sim.shape, dtype=torch.bool)` -> `eye(*guided_sim.shape, dtype=torch.bool).roll(offset, 1)`
A right first sentence says: in GISTEmbedLoss the positive mask (torch.eye) lacks the rank's offset into the gathered
candidates, so that on rank 1 the wrong columns, false negatives among rank 0's positives, are kept in the softmax.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

WORDS, WIDTH, HEADS, LENGTH, TOPICS, PAIRS, TEMPERATURE = 40, 16, 2, 7, 4, 16, 0.1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SentenceEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, words):
        x = self.words(words) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.normalize(x.mean(1), dim=-1)


class Guide(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 2 * WIDTH).requires_grad_(False)

    def forward(self, words):
        return F.normalize(self.words(words).mean(1), dim=-1)


class AllGatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        return all_gather(own, group)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.contiguous(), group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


def all_gather(own, group):
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)


class GISTEmbedLoss(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group

    def mask_false_negatives(self, sim, guided_sim, threshold, positive_mask=None):
        mask = guided_sim > threshold
        mask = mask if positive_mask is None else mask & ~positive_mask
        return sim.masked_fill(mask, -torch.inf)

    def forward(self, anchor, positive, anchor_guide, positive_guide):
        offset = 0 if self.group is None else self.group.rank() * len(anchor)
        own = slice(offset, offset + len(anchor))
        if self.group is not None:
            positive = AllGatherWithGradient.apply(positive, self.group)
            positive_guide = all_gather(positive_guide, self.group)
        guided_sim = anchor_guide @ positive_guide.mT
        threshold = guided_sim.diagonal(offset).view(-1, 1)
        positive_mask = torch.eye(*guided_sim.shape, dtype=torch.bool)
        ap = self.mask_false_negatives(anchor @ positive.mT, guided_sim, threshold, positive_mask)
        guided_sim = positive_guide[own] @ positive_guide.mT
        pp = self.mask_false_negatives(positive[own] @ positive.mT, guided_sim, threshold)
        labels = torch.arange(offset, offset + len(anchor))
        return F.cross_entropy(torch.cat((ap, pp), dim=1) / TEMPERATURE, labels)


class SentenceTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.guide, self.criterion = SentenceEncoder(), Guide(), GISTEmbedLoss()

    def forward(self, both):
        return self.criterion(*self.encoder(both).chunk(2), *self.guide(both).chunk(2))


def plain():
    return SentenceTransformer()


def parallel(mesh):
    model, group = SentenceTransformer(), mesh.get_group("dp")
    model.encoder = DistributedDataParallel(model.encoder, process_group=group)
    model.criterion.group = group
    return model


def loss(model, batch):
    return model(torch.cat((batch["anchor"], batch["positive"])))


generator = torch.Generator().manual_seed(3817)


def sentences(topic):
    usual = topic.unsqueeze(-1) * 10 + torch.randint(10, (PAIRS, LENGTH), generator=generator)
    other = torch.randint(WORDS, (PAIRS, LENGTH), generator=generator)
    return usual.where(torch.rand(PAIRS, LENGTH, generator=generator) < 0.7, other)


def pairs():
    topic = torch.randint(TOPICS, (PAIRS,), generator=generator)
    return {"anchor": sentences(topic), "positive": sentences(topic)}


batches = [pairs() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, split="dp", ranks={"dp": 2})
options["rename"] = lambda name: name.replace("encoder.module.", "encoder.")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
