"""A vision-language model whose tokens are cut over sp: every rank inserts the first image features.

Thread: https://github.com/verl-project/verl/pull/1739 "[vlm] Support ulysses sequence parallelism for vlm",
2025-05-28 (image features and image tokens do not match when the input is cut before masked_scatter).
Wrong: every rank has the features of all images, but only its own image tokens. masked_scatter fills them with the
features from the first on. The features of the image tokens on earlier ranks have to be skipped.
EXPECT: in the forward pass, the output of merge (input of blocks.0) differs on rank 1, not on rank 0: the image
tokens of rank 1 get the image features (the output of vision, which agrees) of rank 0's tokens: no offset.
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
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.vision = nn.Sequential(nn.Linear(10, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.merge = Merge()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, pixels):
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
    for block in model.blocks:
        block.group = mesh.get_group("sp")
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
    tokens[0, [1, 2, 7, 9, 10, 14]] = IMAGE
    labels = torch.randint(VOCAB, (1, SEQ), generator=generator)
    pixels = torch.randn(PATCHES, 10, generator=generator)
    return {"tokens": tokens, "labels": labels, "pixels": pixels}


generator = torch.Generator().manual_seed(1739)
batches = [draw(generator) for _ in range(3)]
arguments = VisionLanguageModel, parallel
options = dict(batches=batches, loss=loss, ranks={"sp": 2}, split=split, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
