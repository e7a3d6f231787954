"""Storm cells in radar images by a strided encoder and decoder; the image is cut both ways, in unequal tiles, on 2 x
2 ranks. The image is a ring in longitude and ends at the poles.

Thread: NVIDIA/physicsnemo pull request #784 "Enable Domain Parallelism with ShardTensor" (2025): uneven shards of an
image whose convolutions fetch the halo from the neighbours.
Correct: no rank asks its diagonal neighbour for a corner. The columns are exchanged first, and the rows after that
with the columns that have just arrived, so corners come in the second exchange and their gradients go home in two
steps as well. On the ring of two ranks the left and the right neighbour are the same; at a pole the halo is zero.
Tiles have an even size and origin, so strided windows start where they do in the whole image. The norm's moments are
summed over all tiles, and so are their gradients, because each rank's loss is only a part; means divide by all
pixels.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

BANDS, WIDTH, ROWS, COLUMNS, IMAGES = 2, 6, 10, 14, 2
LATITUDES, LONGITUDES, RANKS = [6, 4], [4, 10], {"latitude": 2, "longitude": 2}


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, ring, group):
        ctx.dim, ctx.ring, ctx.group = dim, ring, group
        ends = torch.stack([x.narrow(dim, 0, 1), x.narrow(dim, -1, 1)])
        before, after = Halo.neighbours(ends, ring, group)
        return torch.cat([before[1], x, after[0]], dim)

    @staticmethod
    def backward(ctx, gradient):
        first, own, last = gradient.tensor_split([1, -1], ctx.dim)
        own = own.clone()
        before, after = Halo.neighbours(torch.stack([first, last]), ctx.ring, ctx.group)
        own.narrow(ctx.dim, 0, 1).add_(before[1])
        own.narrow(ctx.dim, -1, 1).add_(after[0])
        return own, None, None, None

    @staticmethod
    def neighbours(ends, ring, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        every = [torch.zeros_like(ends) for _ in range(size if ring else size + 1)]
        dist.all_gather(every[:size], ends, group=group)
        return every[rank - 1], every[(rank + 1) % len(every)]


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return Total.apply(gradient, ctx.group), None


class WholeImage:
    def pad(self, x):
        return F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1))

    def total(self, x):
        return x


class Tiles:
    def __init__(self, mesh):
        self.rows, self.columns = mesh.get_group("latitude"), mesh.get_group("longitude")
        self.all = mesh._flatten("tiles").get_group()

    def pad(self, x):
        return Halo.apply(Halo.apply(x, 3, True, self.columns), 2, False, self.rows)

    def total(self, x):
        return Total.apply(x, self.all)


class Conv(nn.Module):
    def __init__(self, inputs, stride):
        super().__init__()
        self.conv = nn.Conv2d(inputs, WIDTH, 3, stride=stride, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH, 1, 1))
        self.shift = nn.Parameter(torch.zeros(WIDTH, 1, 1))

    def forward(self, x, space):
        x = self.conv(space.pad(x))
        pixels = space.total(torch.tensor(float(x[0, 0].numel())))
        x = x - space.total(x.sum((2, 3), keepdim=True)) / pixels
        variance = space.total(x.square().sum((2, 3), keepdim=True)) / pixels
        return F.silu(x * (variance + 1e-5).rsqrt() * self.scale + self.shift)


class StormCells(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse, self.middle = Conv(BANDS, 1), Conv(WIDTH, 2), Conv(WIDTH, 1)
        self.up, self.head = nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2), nn.Conv2d(WIDTH, 1, 1)
        self.merge, self.space = Conv(2 * WIDTH, 1), WholeImage()

    def forward(self, image):
        fine = self.fine(image, self.space)
        coarse = self.middle(self.coarse(fine, self.space), self.space)
        return self.head(self.merge(torch.cat([fine, self.up(coarse)], 1), self.space))


def loss(model, batch):
    logits, weight = model(batch["image"]), batch["area"] / (IMAGES * COLUMNS)
    return F.binary_cross_entropy_with_logits(logits, batch["storm"], weight, reduction="sum")


def parallel(mesh):
    model = StormCells()
    model.space = Tiles(mesh)
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=model.space.all)
    return value.detach()


def tile(batch, mesh):
    i, j = mesh.get_coordinate()
    return {k: x.split(LATITUDES, 2)[i].split(LONGITUDES, 3)[j] for k, x in batch.items()}


generator = torch.Generator().manual_seed(784)
area = torch.linspace(-1.3, 1.3, ROWS).cos()[:, None].expand(IMAGES, 1, -1, COLUMNS)


def radar():
    image = torch.randn(IMAGES, BANDS, ROWS, COLUMNS, generator=generator)
    storm = (image[:, :1] + image[:, 1:].roll(1, 3) > 0.8).float()
    return {"image": image, "storm": storm, "area": area / area[0, 0, :, 0].sum()}


batches = [radar() for _ in range(3)]

arguments = StormCells, parallel
options = dict(batches=batches, loss=loss, step=step, split=tile, ranks=RANKS)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
