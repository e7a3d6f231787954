"""Image and text under DDP on ranks with five and three pairs: features are padded for the gather, and the padding is cut off.

Thread: of the kind Lightning-AI/pytorch-lightning issue #7773 "Enable all_gather to work for Tensors with different shapes along the
first dimension" (2021) and pytorch/pytorch issue #23299 "Add gatherv/allgatherv primitives" (2019).
Correct: after the gather, each rank's rows are cut to their true number, in order; labels begin at the number of rows before the
rank's own. A rank's loss is the sum over its own pairs, times the ranks and over all pairs, so DDP's average is the mean.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, normalize, pad
from torch.nn.parallel import DistributedDataParallel

import titanlite

SIZES, IMAGE, WORDS, DIM = (5, 3), 7, 12, 6


class PaddedGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes):
        ctx.sizes = sizes
        padded = pad(x, (0, 0, 0, max(sizes) - len(x))).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.split(ctx.sizes)[dist.get_rank()], None


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image1, self.image2 = nn.Linear(IMAGE, 12), nn.Linear(12, DIM, bias=False)
        self.words, self.text = nn.EmbeddingBag(WORDS, 12), nn.Linear(12, DIM, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, image, text):
        image = normalize(self.image2(gelu(self.image1(image))), dim=-1)
        text = normalize(self.text(gelu(self.words(text))), dim=-1)
        return image, text, self.logit_scale.exp()


def loss(model, batch):
    image, text, scale = model(batch["image"], batch["text"])
    logits, labels = scale * image @ text.t(), torch.arange(len(image))
    return (cross_entropy(logits, labels) + cross_entropy(logits.t(), labels)) / 2


def parallel(mesh):
    return DistributedDataParallel(Clip(), process_group=mesh.get_group("dp"))


def own_pairs(batch, mesh):
    return {name: value.split(SIZES)[mesh.get_rank()] for name, value in batch.items()}


def local_loss(model, batch):
    image, text, scale = model(batch["image"], batch["text"])
    size = torch.tensor(len(image))
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    sizes = [int(s) for s in sizes]
    images, texts = PaddedGather.apply(image, sizes), PaddedGather.apply(text, sizes)
    labels = torch.arange(len(image)) + sum(sizes[: dist.get_rank()])
    value = cross_entropy(scale * image @ texts.t(), labels, reduction="sum")
    value = value + cross_entropy(scale * text @ images.t(), labels, reduction="sum")
    return value / 2 * len(sizes) / sum(sizes)


rng = torch.Generator().manual_seed(424)
batches = [
    {
        "image": torch.randn(sum(SIZES), IMAGE, generator=rng),
        "text": torch.randint(WORDS, (sum(SIZES), 4), generator=rng),
    }
    for _ in range(3)
]
arguments = Clip, parallel
options = dict(batches=batches, loss=loss, parallel_loss=local_loss, ranks={"dp": 2})
options["split"] = own_pairs

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
