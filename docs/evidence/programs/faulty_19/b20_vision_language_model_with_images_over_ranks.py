"""A vision-language model with Ulysses sequence parallelism; the images of the batch are dealt to the ranks for the vision tower.

Thread: verl-project/verl pull request #5230 and alibaba/ROLL pull request #357 "add Vision DP for parallel ViT computation across
Ulysses SP ranks" (2026, "all-gather with gradient fix"): the backward of the gather must all-reduce the gradients before it
slices, as each rank has only those of its own part of the sequence.
Fault: GatherImages.backward returns the rank's slice of its own gradient; what the image tokens in the other rank's part of the
sequence contribute to this rank's images is lost, so the tower and the projector get partial gradients.
REPAIR: `grad = grad.contiguous()` -> `grad = summed(grad, ctx.group)`
A right first sentence says: the backward pass of the gather of the image features only slices the local gradient instead of
summing it over the sequence parallel ranks first, so the vision tower and projector miss the gradients from the other ranks'
tokens.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, IGNORE = 21, 16, 4, 16, -100
ROWS, IMAGES, SIZE, PATCH, VISION, TOKENS, IMAGE_TOKEN = 2, 2, 8, 4, 12, 4, 20


def summed(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class GatherImages(torch.autograd.Function):
    """The features of all images from those of the ranks' images."""

    @staticmethod
    def forward(ctx, features, group):
        ctx.group, ctx.number = group, len(features)
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, features.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        return grad.split(ctx.number)[dist.get_rank(ctx.group)], None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, scatter, gather):
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        send = torch.stack(x.chunk(dist.get_world_size(group), scatter)).contiguous()
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=group)
        return torch.cat(received.unbind(), gather)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group, ctx.gather, ctx.scatter), None, None, None


class Block(nn.Module):
    group = None

    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def exchange(self, x, scatter, gather):
        return x if self.group is None else AllToAll.apply(x, self.group, scatter, gather)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        qkv = self.exchange(qkv, 2, 3)
        y = self.exchange(F.scaled_dot_product_attention(*qkv, is_causal=self.causal), 2, 1)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, VISION, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.randn(TOKENS, VISION) / 4)
        self.block, self.norm = Block(VISION, 2, causal=False), nn.LayerNorm(VISION)

    def forward(self, images):
        return self.norm(self.block(self.patches(images).flatten(2).mT + self.places))


class VisionLanguageModel(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.vision = VisionTower()
        self.projector = nn.Sequential(nn.Linear(VISION, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, causal=True) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def own(self, x, dim):
        group = self.group
        return x if group is None else x.tensor_split(group.size(), dim)[group.rank()]

    def forward(self, tokens, images):
        features = self.projector(self.vision(self.own(images.flatten(0, 1), 0)))
        if self.group is not None:
            features = GatherImages.apply(features, self.group)
        x = self.words(tokens).masked_scatter((tokens == IMAGE_TOKEN).unsqueeze(-1), features)
        x = self.blocks(self.own(x + self.places.weight, 1))
        return self.head(self.norm(x))


def plain():
    return VisionLanguageModel()


def parallel(mesh):
    model = VisionLanguageModel()
    for module in (model, *model.blocks):
        module.group = mesh.get_group("sp")
    return model


def loss(model, batch):
    tokens, labels, images = batch
    return F.cross_entropy(model(tokens, images).mT, labels, ignore_index=IGNORE)


def step(model, batch):
    tokens, labels, images = batch
    logits, targets = model(tokens, images), model.own(labels, 1)
    total = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="sum")
    value = total / (labels != IGNORE).sum()
    value.backward()
    for parameter in model.parameters():
        parameter.grad = summed(parameter.grad, model.group)
    return summed(value.detach(), model.group)


generator = torch.Generator().manual_seed(5230)


def documents():
    """Texts with two images each, one early and one late; the next words are the labels."""
    text = torch.randint(0, IMAGE_TOKEN, (ROWS, LENGTH + 1), generator=generator)
    for row in text:
        first, second = torch.randint(0, 5, (2,), generator=generator).tolist()
        row[first : first + TOKENS] = row[8 + second : 8 + second + TOKENS] = IMAGE_TOKEN
    labels = text[:, 1:].masked_fill(text[:, 1:] == IMAGE_TOKEN, IGNORE)
    images = torch.randn(ROWS, IMAGES, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return text[:, :-1].contiguous(), labels.contiguous(), images


batches = [documents() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"sp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
