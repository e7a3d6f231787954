"""A vision-language model whose tokens are cut over sp: each rank computes the features of its own image tokens.

Thread: https://github.com/verl-project/verl/pull/1739 "[vlm] Support ulysses sequence parallelism for vlm",
2025-05-28.
Right: a rank counts its image tokens, the counts are gathered, and the rank takes its patches from all of them. So
the vision tower sees other patches on each rank, four on rank 0 and two on rank 1.
Must not be accused: a module whose input has another size on each rank, cut at a place that depends on the data, and
a gather of integers.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, PATCHES, IMAGE = 12, 8, 16, 6, 0


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        if self.group is not None:
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        return x + self.out((q @ k.mT / DIM**0.5).softmax(-1) @ v)


class Merge(nn.Module):
    def forward(self, embeds, tokens, features):
        mask = (tokens == IMAGE).unsqueeze(-1).expand_as(embeds)
        return embeds.masked_scatter(mask, features)


class VisionLanguageModel(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.vision = nn.Sequential(nn.Linear(10, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.merge = Merge()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def own_patches(self, tokens, pixels):
        count = (tokens == IMAGE).sum().view(1)
        counts = [torch.empty_like(count) for _ in range(self.group.size())]
        dist.all_gather(counts, count, group=self.group)
        return pixels.split(torch.cat(counts).tolist())[self.group.rank()]

    def forward(self, tokens, pixels):
        if self.group is not None:
            pixels = self.own_patches(tokens, pixels)
        x = self.merge(self.embed(tokens), tokens, self.vision(pixels))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["pixels"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def split(batch, mesh):
    size, rank = mesh["sp"].size(), mesh.get_local_rank("sp")
    return {n: t if n == "pixels" else t.chunk(size, 1)[rank] for n, t in batch.items()}


def parallel(mesh):
    model = VisionLanguageModel()
    for module in (model, *model.blocks):
        module.group = mesh.get_group("sp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


def draw(generator):
    tokens = torch.randint(1, VOCAB, (1, SEQ), generator=generator)
    tokens[0, [1, 2, 3, 7, 9, 14]] = IMAGE
    labels = torch.randint(VOCAB, (1, SEQ), generator=generator)
    pixels = torch.randn(PATCHES, 10, generator=generator)
    return {"tokens": tokens, "labels": labels, "pixels": pixels}


generator = torch.Generator().manual_seed(1739)
batches = [draw(generator) for _ in range(3)]
arguments = VisionLanguageModel, parallel
options = dict(batches=batches, loss=loss, ranks={"sp": 2}, split=split, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
