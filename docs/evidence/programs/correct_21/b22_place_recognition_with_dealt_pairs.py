"""Place recognition from pairs of photos (contrastive, both directions) under DDP; the pairs are dealt to the ranks in turn.

Might be accused because: a rank's rows aren't a block of the batch, the gathered rows come in another order than on one process,
the labels jump by the number of ranks, and the learned temperature sits outside of the softmax of any single rank.
Correct because: gathering puts the rows of all ranks back in turn, so the label of a rank's row i is i times the ranks plus the
rank; the backward pass of the gathering adds up the gradients of all ranks, and DDP's mean of equal shares is the mean of all.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SIZE, WIDTH, OUT, PAIRS = 8, 8, 6, 6


class GatherInTurn(torch.autograd.Function):
    """Row i of rank r becomes row i * ranks + r."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts, dim=1).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group) :: dist.get_world_size(ctx.group)], None


class PhotoEncoder(nn.Module):
    """Generalized-mean pooling over a small network of convolutions, as usual in retrieval."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.power = nn.Parameter(torch.tensor(3.0))
        self.project = nn.Linear(WIDTH, OUT)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def embed(self, photos):
        x = F.softplus(self.conv2(F.silu(self.norm(self.conv1(photos)))))
        x = x.pow(self.power).mean((2, 3)).pow(1 / self.power)
        return F.normalize(self.project(x), dim=-1)

    def forward(self, summer, winter):
        both = self.embed(torch.cat([summer, winter]))
        return *both.chunk(2), self.temperature.exp()


def pair_loss(model, batch, group=None):
    summer, winter, sharpness = model(batch["summer"], batch["winter"])
    labels, all_summer, all_winter = torch.arange(len(summer)), summer, winter
    if group is not None:
        labels = labels * dist.get_world_size(group) + dist.get_rank(group)
        all_summer = GatherInTurn.apply(summer, group)
        all_winter = GatherInTurn.apply(winter, group)
    forth = F.cross_entropy(sharpness * summer @ all_winter.mT, labels)
    back = F.cross_entropy(sharpness * winter @ all_summer.mT, labels)
    return (forth + back) / 2


def plain():
    return PhotoEncoder()


def parallel(mesh):
    return DistributedDataParallel(PhotoEncoder()), mesh.get_group("dp")


def loss(model, batch):
    return pair_loss(model, batch)


def step(built, batch):
    model, group = built
    value = pair_loss(model, batch, group)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value / dist.get_world_size(group)


def split(batch, mesh):
    rank, ranks = mesh.get_local_rank("dp"), mesh["dp"].size()
    return {name: photos[rank::ranks] for name, photos in batch.items()}


generator = torch.Generator().manual_seed(77)


def places():
    place = torch.randn(PAIRS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    season = torch.randn(2, PAIRS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return {"summer": place + 0.4 * season[0], "winter": place + 0.4 * season[1] - 0.3}


batches = [places() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
