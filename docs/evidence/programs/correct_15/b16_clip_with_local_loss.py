"""CLIP under DDP, each rank of which computes the contrastive loss of its own rows alone, against the features of all ranks.

Thread: Jingfeng0705/LIFT issue #4 "Why use local_loss=True with gather_with_grad=True?" (2025): as the loss is local, "we do not
need grad for features from other ranks, right?" was wrongly agreed with. mlfoundations/open_clip issue #616 has it right: the two
together give the loss and the gradients of the whole matrix.
Correct: each rank's loss is the mean over its own rows, the labels are shifted by the rank, and the backward pass of the gather
sums the gradients that all ranks' losses send to a feature; that sum, too large by the number of ranks, is what DDP's mean
divides. The logit scale sits in the model, so DDP averages its gradient as well. The rank's loss isn't that of any matrix of the
plain model.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCABULARY, LENGTH, WIDTH, DIM = 15, 5, 12, 8


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.mix = nn.Linear(4, 4)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIM, bias=False)

    def forward(self, images):
        x = self.patch(images).flatten(2)
        x = x + self.mix(F.gelu(x))
        return self.out(self.norm(x.mean(-1)))


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIM, bias=False)

    def forward(self, tokens):
        x = self.layer(self.embed(tokens) + self.position.weight)
        return self.out(self.norm(x[:, -1]))


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = ImageTower(), TextTower()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, tokens):
        image = F.normalize(self.visual(images), dim=-1)
        text = F.normalize(self.text(tokens), dim=-1)
        return image, text, self.logit_scale.exp()


class GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        gathered = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, features.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def plain():
    return CLIP()


def parallel(mesh):
    return DistributedDataParallel(CLIP())


def loss(model, batch):
    image, text, scale = model(batch["images"], batch["tokens"])
    logits = scale * image @ text.t()
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def step(model, batch):
    image, text, scale = model(batch["images"], batch["tokens"])
    all_image, all_text = GatherWithGrad.apply(image), GatherWithGrad.apply(text)
    labels = torch.arange(len(image)) + dist.get_rank() * len(image)
    per_image = F.cross_entropy(scale * image @ all_text.t(), labels)
    per_text = F.cross_entropy(scale * text @ all_image.t(), labels)
    value = (per_image + per_text) / 2
    value.backward()
    return value.detach()


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


generator = torch.Generator().manual_seed(616)
batches = [
    {
        "images": torch.randn(9, 3, 8, 8, generator=generator, dtype=torch.float64),
        "tokens": torch.randint(0, VOCABULARY, (9, LENGTH), generator=generator),
    }
    for _ in range(3)
]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, clip=clip, split="dp", ranks={"dp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
