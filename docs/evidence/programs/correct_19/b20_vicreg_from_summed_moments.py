"""VICReg on two views: the ranks exchange sums and second moments of the embeddings and no embeddings, under DDP.

Might be accused because: the all-reduce within the loss has the identity as its backward pass; the loss of all ranks is the
same number, yet it is multiplied by the number of ranks before the backward pass; the images are dealt in turns and not in
blocks.
Correct because: all terms are functions of sums over the images. The derivative of the loss by a sum is the same on all ranks,
and the identity hands it to the rank's own images, so a rank's gradient is its images' part of the whole; DDP divides the sum
of these parts by the number of ranks, which the factor cancels. The loss doesn't depend on the order of the images.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SIZE, PATCH, WIDTH, EMBEDDING = 8, 4, 16, 10
SIMILARITY, VARIANCE, COVARIANCE = 25.0, 25.0, 1.0


class PatchMixer(nn.Module):
    def __init__(self, patches):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Linear(patches, patches)
        self.channels = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Encoder(nn.Module):
    """Backbone and expander."""

    def __init__(self):
        super().__init__()
        patches = (SIZE // PATCH) ** 2
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.mixers = nn.Sequential(PatchMixer(patches), PatchMixer(patches))
        self.expander = nn.Sequential(
            nn.Linear(WIDTH, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, EMBEDDING)
        )

    def forward(self, images):
        x = self.mixers(self.patches(images).flatten(2).mT)
        return self.expander(x.mean(1))


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks; a derivative by the sum is one by each summand."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def moments(a, b):
    """In one vector: number of images, squared distance, sums and second moments of both views."""
    number = a.new_tensor([len(a)])
    distance = (a - b).square().sum().reshape(1)
    parts = [number, distance, a.sum(0), b.sum(0), (a.T @ a).flatten(), (b.T @ b).flatten()]
    return torch.cat(parts)


def vicreg(sums):
    d = EMBEDDING
    number, distance, *views = sums.split([1, 1, d, d, d * d, d * d])
    value = SIMILARITY * distance.squeeze() / (number.squeeze() * d)
    for total, second in zip(views[:2], views[2:]):
        mean = total / number
        covariance = (second.view(d, d) - number * torch.outer(mean, mean)) / (number - 1)
        deviation = (covariance.diagonal() + 1e-4).sqrt()
        off_diagonal = covariance - covariance.diagonal().diag()
        value = value + VARIANCE * F.relu(1 - deviation).mean() / 2
        value = value + COVARIANCE * off_diagonal.square().sum() / d
    return value


def embed(model, batch):
    """Both views in one forward pass."""
    a, b = batch
    return model(torch.cat([a, b])).chunk(2)


def plain():
    return Encoder()


def parallel(mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(Encoder(), process_group=group), group


def loss(model, batch):
    return vicreg(moments(*embed(model, batch)))


def step(built, batch):
    model, group = built
    value = vicreg(SumOverRanks.apply(moments(*embed(model, batch)), group))
    (value * dist.get_world_size(group)).backward()
    return value.detach()


def in_turns(batch, mesh):
    rank, size = mesh.get_local_rank("dp"), mesh["dp"].size()
    return tuple(view[rank::size] for view in batch)


generator = torch.Generator().manual_seed(21)


def views(number=12):
    """Two noisy and mirrored copies of the same images."""
    shape = number, 3, SIZE, SIZE
    images, *noise = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return images + 0.3 * noise[0], images.flip(-1) + 0.3 * noise[1]


batches = [views() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=in_turns,
    ranks={"dp": 4},
    optimizer=lambda parameters: torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, weight_decay=1e-4
    ),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
