"""A CLIP-like model under DDP whose loss takes the features of all ranks as negatives.

Thread: facebookresearch/SLIP issue #31 "The CLIP loss implementation seems not completely right" (2023), also met in
LijieFan/LaCLIP issue #6: the features of other ranks are gathered without gradients, so the loss is right and training is
worse.
Fault: in gather, which all_gather_batch calls, dist.all_gather fills plain buffers, which autograd does not see. The gathered
features are constants in ContrastiveLoss: an image embedding gets no gradient from logits_per_text, nor a text embedding from
logits_per_image, where they are the columns.
REPAIR: `output.append(torch.cat(gather(tensor.contiguous()), dim=0))` ->
`output.append(torch.cat(torch.distributed.nn.functional.all_gather(tensor.contiguous()), dim=0))`
A right first sentence says: the features that all_gather_batch collects for the contrastive loss carry no gradient
(dist.all_gather is not differentiable), so both encoders miss the gradient through the gathered image and text features.
"""

import math

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

EMBED, WIDTH, PATCH, VOCAB, WORDS = 8, 16, 4, 20, 6


class ImageEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patchify = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, bias=False
        )
        self.projection = nn.Linear(WIDTH, EMBED, bias=False)

    def forward(self, image):
        x = self.patchify(image).flatten(2).transpose(1, 2)
        return self.projection(self.block(x).mean(1))


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.ln_final = nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, EMBED, bias=False)

    def forward(self, text):
        x = self.token_embedding(text)
        x = x + self.mlp(x)
        return self.projection(self.ln_final(x).mean(1))


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = ImageEncoder()
        self.text = TextEncoder()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, image, text):
        return {
            "image_embed": self.visual(image),
            "text_embed": self.text(text),
            "logit_scale": self.logit_scale.exp(),
        }


def gather(tensor):
    tensor_all = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensor_all, tensor)
    return tensor_all


def all_gather_batch(tensors):
    """Each of the tensors with the rows of all ranks, in the order of the ranks."""
    if dist.get_world_size() == 1:
        return tensors
    output = []
    for tensor in tensors:
        output.append(torch.cat(gather(tensor.contiguous()), dim=0))
    return output


class ContrastiveLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.labels = None
        self.last_local_batch_size = None

    def forward(self, outputs):
        image_embed = F.normalize(outputs["image_embed"], dim=-1)
        text_embed = F.normalize(outputs["text_embed"], dim=-1)
        logit_scale = outputs["logit_scale"]
        local_batch_size = image_embed.size(0)
        if local_batch_size != self.last_local_batch_size:
            self.labels = local_batch_size * dist.get_rank() + torch.arange(local_batch_size)
            self.last_local_batch_size = local_batch_size
        image_embed_all, text_embed_all = all_gather_batch([image_embed, text_embed])
        logits_per_image = logit_scale * image_embed @ text_embed_all.t()
        logits_per_text = logit_scale * text_embed @ image_embed_all.t()
        return (
            F.cross_entropy(logits_per_image, self.labels)
            + F.cross_entropy(logits_per_text, self.labels)
        ) / 2


def loss(model, batch):
    outputs = model(batch["image"], batch["text"])
    image, text = (
        F.normalize(outputs["image_embed"], dim=-1),
        F.normalize(outputs["text_embed"], dim=-1),
    )
    logits = outputs["logit_scale"] * image @ text.t()
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def parallel():
    return DistributedDataParallel(CLIP()), ContrastiveLoss()


def step(built, batch):
    model, criterion = built
    value = criterion(model(batch["image"], batch["text"]))
    value.backward()
    return value


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(29)
    for _ in range(count):
        yield {
            "image": torch.randn(
                rows, 3, 2 * PATCH, 2 * PATCH, generator=generator, dtype=torch.float64
            ),
            "text": torch.randint(VOCAB, (rows, WORDS), generator=generator),
        }


arguments = CLIP, parallel
options = dict(
    batches=list(make_batches(3, rows=8)), loss=loss, step=step, split="dp", ranks={"dp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
