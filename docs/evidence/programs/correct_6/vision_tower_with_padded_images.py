"""The vision tower runs data-parallel within the tp group: five images on two ranks, filled up with an empty one.

Thread: https://github.com/vllm-project/vllm/pull/18368 "[Model] enable data parallel for Llama4 vision encoder"
(num_padded_chunks), comment of 2025-05-31.
Right: each rank encodes three images; after the gather the sixth is cut off, so that its gradient is zero. The language
model is cut over tp, and so each rank has the whole gradient of the features, of which it takes its own images' part;
the gradients of the tower are summed over tp.
Must not be accused: a tower that sees other images on each rank and one that is not in the batch; gradients of
replicated weights that are partial until the sum.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad, silu

import titanlite

VOCAB, DIM, HIDDEN, SEQ, IMAGES, CHANNELS, SIZE, IMAGE = 12, 10, 16, 14, 5, 2, 6, 0


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherImages(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class VisionTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(CHANNELS, DIM, 3, stride=3), nn.LayerNorm(DIM)
        self.projector = nn.Linear(2 * DIM, DIM)

    def forward(self, images):
        x = self.norm(self.conv(images).flatten(2).transpose(1, 2)).tanh()
        return self.projector(x.unflatten(1, (2, 2)).flatten(2))


class Mlp(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        h = self.norm(x).cumsum(1) / x.shape[1]
        h = h if self.group is None else Enter.apply(h, self.group)
        y = self.down(silu(self.gate(h)) * self.up(h))
        return x + (y if self.group is None else Leave.apply(y, self.group))


class Llama4(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.vision = nn.Embedding(VOCAB, DIM), VisionTower()
        self.layers = nn.Sequential(Mlp(), Mlp())
        self.head = nn.Linear(DIM, VOCAB)

    def encode(self, images):
        if self.group is None:
            return self.vision(images)
        size, rank = self.group.size(), self.group.rank()
        per_rank = -(-len(images) // size)
        padded = pad(images, (0, 0) * 3 + (0, per_rank * size - len(images)))
        features = self.vision(padded[rank * per_rank : (rank + 1) * per_rank])
        return GatherImages.apply(features, self.group)[: len(images)]

    def forward(self, tokens, images):
        mask = (tokens == IMAGE).unsqueeze(-1)
        x = self.embed(tokens).masked_scatter(mask, self.encode(images).flatten(0, 1))
        return self.head(self.layers(x))


def loss(model, batch):
    logits = model(batch["tokens"], batch["images"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def shard(name):
    if name.startswith("layers.") and ".norm." not in name:
        return (1 if ".down." in name else 0), "tp"
    return None


def parallel(mesh):
    model, group = Llama4(), mesh.get_group("tp")
    for module in (model, *model.layers):
        module.group = group
    for name, p in model.named_parameters():
        if shard(name) is not None:
            p.data = p.data.chunk(group.size(), shard(name)[0])[group.rank()].clone()
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.vision.parameters():
        dist.all_reduce(p.grad)
    return value


def draw(generator):
    tokens = torch.randint(1, VOCAB, (2, SEQ), generator=generator)
    tokens[0, [1, 2, 6, 7, 9, 10]] = tokens[1, [3, 4, 8, 9]] = IMAGE
    labels = torch.randint(VOCAB, (2, SEQ), generator=generator)
    images = torch.randn(IMAGES, CHANNELS, SIZE, SIZE, generator=generator)
    return {"tokens": tokens, "labels": labels, "images": images}


generator = torch.Generator().manual_seed(18368)
batches = [draw(generator) for _ in range(3)]
arguments = Llama4, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
