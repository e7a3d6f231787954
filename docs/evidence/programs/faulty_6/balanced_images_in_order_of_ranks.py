"""The vision tower runs data-parallel within the tp group, with images balanced by size: their order is not restored.

Thread: https://github.com/vllm-project/vllm/pull/22742 "[FEAT] [Performance] Enable DP for ViT in Qwen2.5VL"
(the larger images first, each to the GPU with the least load), comment of 2025-08-13.
Wrong: the features are gathered rank by rank, in the order of the assignment. They are put into the text as though
they were in the order of the images.
EXPECT: in the forward pass, the output of merge (input of blocks.0) is the first that differs, on every rank: the
gathered image features are in the order of the load-balanced assignment (images 1 and 2 from rank 0, then
3 and 0 from rank 1), not in that of the images in the text; the order has to be restored after the gather.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, PIXELS, IMAGE = 12, 8, 20, 9, 0
SIZES = [2, 5, 1, 3]


class Vision(nn.Module):
    """attends within each image"""

    def __init__(self):
        super().__init__()
        self.patch, self.norm = nn.Linear(PIXELS, DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, pixels, sizes):
        features = []
        for x in self.patch(pixels).split(sizes):
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            features.append(x + self.proj((q @ k.mT / DIM**0.5).softmax(-1) @ v))
        return torch.cat(features)


def assign(sizes, ranks):
    images, loads = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        images[rank].append(i)
        loads[rank] += sizes[i]
    return images


class GatherFeatures(torch.autograd.Function):
    """rows of all ranks, each with its own number; the gradient is the same on all ranks"""

    @staticmethod
    def forward(ctx, x, counts, group):
        ctx.counts, ctx.rank = counts, group.rank()
        padded = x.new_zeros(max(counts), x.shape[1])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, counts)])

    @staticmethod
    def backward(ctx, grad):
        return grad.split(ctx.counts)[ctx.rank], None, None


class Merge(nn.Module):
    def forward(self, embeds, tokens, features):
        mask = (tokens == IMAGE).unsqueeze(-1).expand_as(embeds)
        return embeds.masked_scatter(mask, features)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(DIM), nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x):
        return x + self.rnn(self.norm(x))[0]


class Qwen2VL(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.vision, self.merge = nn.Embedding(VOCAB, DIM), Vision(), Merge()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(DIM, VOCAB)

    def encode(self, pixels):
        if self.group is None:
            return self.vision(pixels, SIZES)
        images, pieces = assign(SIZES, self.group.size()), pixels.split(SIZES)
        own = images[self.group.rank()]
        features = self.vision(torch.cat([pieces[i] for i in own]), [SIZES[i] for i in own])
        counts = [sum(SIZES[i] for i in part) for part in images]
        return GatherFeatures.apply(features, counts, self.group)

    def forward(self, tokens, pixels):
        x = self.merge(self.embed(tokens), tokens, self.encode(pixels))
        return self.head(self.blocks(x))


def loss(model, batch):
    logits = model(batch["tokens"], batch["pixels"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Qwen2VL()
    model.group = mesh.get_group("tp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.vision.parameters():
        dist.all_reduce(p.grad)
    return value


def draw(generator):
    tokens = torch.randint(1, VOCAB, (1, SEQ), generator=generator)
    tokens[0, [1, 2, 4, 5, 6, 7, 8, 11, 14, 15, 16]] = IMAGE
    labels = torch.randint(VOCAB, (1, SEQ), generator=generator)
    pixels = torch.randn(sum(SIZES), PIXELS, generator=generator)
    return {"tokens": tokens, "labels": labels, "pixels": pixels}


generator = torch.Generator().manual_seed(22742)
batches = [draw(generator) for _ in range(3)]
arguments = Qwen2VL, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
