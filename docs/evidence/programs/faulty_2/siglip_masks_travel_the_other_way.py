"""SigLIP's ring in which texts and their masks go round in opposite directions.

Thread: https://github.com/mlfoundations/open_clip/issues/944 "Questions regarding the implementation of
SigLIP loss", 2024-09-27 (the exchange of text_mask takes left and right in the other order than that
of text_features).
Wrong: rank r gets the texts of rank r-1, but the masks of rank r+1.
A right diagnosis says: both towers' outputs agree, the loss does not: the masks of the texts that come
from another rank do not belong to them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import normalize, softplus
from torch.nn.parallel import DistributedDataParallel

import titanlite


def exchange(tensor, to, source):
    received = torch.empty_like(tensor)
    ops = [
        dist.P2POp(dist.isend, tensor.contiguous(), to),
        dist.P2POp(dist.irecv, received, source),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    return received


class NeighbourExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, to, source):
        ctx.to, ctx.source = to, source
        return exchange(tensor, to, source)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.source, ctx.to), None, None


class TwoTower(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, dim))
        self.text = nn.Sequential(nn.Linear(7, 24), nn.GELU(), nn.Linear(24, dim))
        self.logit_scale, self.logit_bias = (
            nn.Parameter(torch.tensor(1.0)),
            nn.Parameter(torch.tensor(-1.0)),
        )

    def forward(self, image, text):
        image, text = normalize(self.visual(image), dim=1), normalize(self.text(text), dim=1)
        return image, text, self.logit_scale.exp(), self.logit_bias


def pair_loss(image, text, mask, scale, bias, negative_only=False):
    labels = -torch.ones(len(image), len(text))
    if not negative_only:
        labels += 2 * torch.eye(len(image))
    return (softplus(-labels * (scale * image @ text.t() + bias)) * mask).sum() / len(image)


def single_gpu_loss(model, batch):
    image, text, scale, bias = model(batch["image"], batch["text"])
    return pair_loss(image, text, batch["mask"], scale, bias)


def siglip_loss(model, batch):
    image, text, scale, bias = model(batch["image"], batch["text"])
    mask, rank, world = batch["mask"], dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world, (rank + 1) % world
    loss = pair_loss(image, text, mask, scale, bias)
    for _ in range(world - 1):
        text = NeighbourExchange.apply(text, right, left)
        mask = exchange(mask, left, right)
        loss = loss + pair_loss(image, text, mask, scale, bias, negative_only=True)
    return loss


def build():
    return DistributedDataParallel(TwoTower())


generator = torch.Generator().manual_seed(944)
batches = [
    {
        "image": torch.randn(12, 12, generator=generator),
        "text": torch.randn(12, 7, generator=generator),
        "mask": torch.randint(2, (12,), generator=generator).float(),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=single_gpu_loss, parallel_loss=siglip_loss)
    print(titanlite.compare(TwoTower, build, ranks={"dp": 3}, split="dp", **options))
