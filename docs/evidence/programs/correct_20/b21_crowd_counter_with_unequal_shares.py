"""A crowd counter that predicts density maps under DDP; three ranks take five, three and one of the nine images of a batch.

Might be accused because: the ranks have different numbers of images, every rank multiplies its loss by the number of ranks and
divides by a count that isn't its own, and the ranks' losses are far from each other and from the loss of the whole batch.
Correct because: each rank sums the errors of its own images and divides by the number of images of all ranks; the factor, the
number of ranks, undoes DDP's average, so the averaged gradients are those of the mean over the whole batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SIZE, WIDTH, PEOPLE = 12, 6, 5
SHARES = 5, 3, 1
COUNT_WEIGHT = 0.1


class Column(nn.Sequential):
    """One column of a multi-column network, for heads of one size."""

    def __init__(self, kernel):
        super().__init__(
            nn.Conv2d(1, WIDTH, kernel, padding=kernel // 2),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.GELU(),
        )


class CrowdCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.columns = nn.ModuleList(Column(kernel) for kernel in (3, 5, 7))
        self.norm = nn.GroupNorm(3, 3 * WIDTH)
        self.density = nn.Conv2d(3 * WIDTH, 1, 1)

    def forward(self, images):
        x = torch.cat([column(images) for column in self.columns], dim=1)
        return F.softplus(self.density(self.norm(x)))


def image_losses(predicted, maps):
    """One value per image: the error of the map, and the error of the count in it."""
    pixels = (predicted - maps).square().mean((1, 2, 3))
    counts = (predicted.sum((1, 2, 3)) - maps.sum((1, 2, 3))).abs()
    return pixels + COUNT_WEIGHT * counts


def plain():
    return CrowdCounter()


def parallel(mesh):
    return DistributedDataParallel(CrowdCounter())


def loss(model, batch):
    images, maps = batch
    return image_losses(model(images), maps).mean()


def split(batch, mesh):
    return tuple(part.split(SHARES)[mesh.get_local_rank("dp")] for part in batch)


def step(model, batch):
    images, maps = batch
    total = image_losses(model(images), maps).sum()
    number = torch.tensor(len(images))
    dist.all_reduce(number)
    (total * dist.get_world_size() / number).backward()
    value = total.detach().clone()
    dist.all_reduce(value)
    return value / number


generator = torch.Generator().manual_seed(531)


def crowds():
    """Blurred points, and the maps of the points at half of the resolution."""
    number = sum(SHARES)
    points = torch.zeros(number, 1, SIZE, SIZE, dtype=torch.float64)
    places = torch.randint(0, SIZE, (2, number, PEOPLE), generator=generator)
    people = torch.arange(number).unsqueeze(1) + torch.zeros(1, PEOPLE, dtype=torch.long)
    points[people, 0, places[0], places[1]] = 1
    noise = torch.randn(points.shape, generator=generator, dtype=torch.float64)
    return F.avg_pool2d(points, 3, 1, 1) * 9 + 0.2 * noise, F.avg_pool2d(points, 2) * 4


batches = [crowds() for _ in range(3)]

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
