"""Gaussian splats dealt to the ranks, which are sent to the rank that renders a camera's image.

Thread: nerfstudio-project/gsplat pull request #253 "Support Multi-GPU training based on the paper 'On Scaling Up 3D
Gaussian Splatting Training'" (2024): points[world_rank::world_size], all ranks project their splats for all cameras,
an all-to-all brings the visible ones to the cameras' own ranks.
Correct: a rank holds every third splat with its own gradient and optimizer state, and nothing is reduced: the exchange
sends the gradients of a splat from all images back to its owner. How many splats a rank sends depends on what is
visible. Splats arrive in another order than in one process, but the renderer sorts them by depth. The statistics for
densification are added up by a hook in the backward pass; a rank has those of its splats. A rank's loss is its share:
its images over the number of all images, its splats over the number of all splats. The shares add up to the loss.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.nn.functional import all_to_all_single

import titanlite

SPLATS, CAMERAS, SIDE, FOCAL, NEAR = 22, 6, 7, 4.0, 2.5
OPACITY_REG, SCALE_REG = 0.01, 0.02
FIELDS = 10


class Splats(nn.Module):
    def __init__(self, rank=0, world=1):
        super().__init__()
        points = torch.randn(SPLATS, 3)
        colors = torch.rand(SPLATS, 3)
        scales = torch.randn(SPLATS, 2) * 0.3 - 1.0
        angles, opacities = torch.randn(SPLATS), torch.randn(SPLATS)
        own = slice(rank, None, world)
        self.means = nn.Parameter(points[own].clone())
        self.log_scales = nn.Parameter(scales[own].clone())
        self.angles = nn.Parameter(angles[own].clone())
        self.opacities = nn.Parameter(opacities[own].clone())
        self.colors = nn.Parameter(torch.logit(colors[own] * 0.8 + 0.1))
        self.register_buffer("grad2d", torch.zeros(len(self.means)))
        self.register_buffer("count", torch.zeros(len(self.means), dtype=torch.long))

    def project(self, camera):
        """One row for each splat that this camera sees."""
        sine, cosine = camera[0].sin(), camera[0].cos()
        zero, one = torch.zeros(()), torch.ones(())
        rotation = torch.stack([cosine, zero, sine, zero, one, zero, -sine, zero, cosine])
        x = self.means @ rotation.view(3, 3).T + camera[1:]
        depth = x[:, 2:]
        means2d = FOCAL * x[:, :2] / depth
        seen = ((depth > NEAR) & (means2d.abs() < SIDE)).all(1)
        means2d.register_hook(lambda grad: self.update_statistics(grad, seen))
        radii = self.log_scales.exp() * FOCAL / depth
        rest = self.angles[:, None], self.opacities.sigmoid()[:, None], self.colors.sigmoid()
        return torch.cat([depth, means2d, radii, *rest], dim=1)[seen]

    def update_statistics(self, grad, seen):
        self.grad2d += grad.norm(dim=-1)
        self.count += seen

    def regularization(self):
        """The splats' share of the means over all splats."""
        opacities, scales = self.opacities.sigmoid().sum(), self.log_scales.exp().sum()
        return (OPACITY_REG * opacities + SCALE_REG * scales / 2) / SPLATS


def rasterize(rows):
    """Blends the splats from front to back; the depth serves to sort only."""
    rows = rows[rows[:, 0].argsort()]
    _, means, radii, angles, opacities, colors = rows.split([1, 2, 2, 1, 1, 3], dim=1)
    place = torch.arange(SIDE) - (SIDE - 1) / 2
    pixels = torch.cartesian_prod(place, place)
    off = pixels[:, None] - means
    sine, cosine = angles[:, 0].sin(), angles[:, 0].cos()
    along = (off[..., 0] * cosine + off[..., 1] * sine) / radii[:, 0]
    across = (off[..., 1] * cosine - off[..., 0] * sine) / radii[:, 1]
    alpha = (opacities[:, 0] * torch.exp(-(along.square() + across.square()) / 2)).clamp(max=0.99)
    left = torch.cumprod(1 - alpha, dim=1)
    before = torch.cat([torch.ones(len(pixels), 1), left[:, :-1]], dim=1)
    return ((before * alpha) @ colors).view(SIDE, SIDE, 3)


def image_loss(image, truth):
    off = image - truth
    return 0.8 * off.abs().mean() + 0.2 * off.square().mean()


def exchange(rows, group):
    """The rows of all cameras in, the rows of this rank's cameras out, from all ranks."""
    world = dist.get_world_size(group)
    own = len(rows) // world
    sizes = torch.tensor([len(row) for row in rows])
    sizes_here = torch.empty_like(sizes)
    dist.all_to_all_single(sizes_here, sizes, group=group)
    sends, receives = (n.view(world, own).sum(1).tolist() for n in (sizes, sizes_here))
    packed = torch.empty(sum(receives), FIELDS)
    packed = all_to_all_single(packed, torch.cat(rows), receives, sends, group=group)
    pieces = packed.split(sizes_here.tolist())
    return [torch.cat(pieces[i::own]) for i in range(own)]


def plain():
    return Splats()


def parallel(mesh):
    return Splats(mesh.get_local_rank(), mesh.size()), mesh.get_group()


def loss(model, batch):
    cameras, images = batch
    values = [image_loss(rasterize(model.project(c)), y) for c, y in zip(cameras, images)]
    return torch.stack(values).mean() + model.regularization()


def step(built, batch):
    model, group = built
    own_cameras, images = batch
    cameras = [torch.empty_like(own_cameras) for _ in range(dist.get_world_size(group))]
    dist.all_gather(cameras, own_cameras, group=group)
    rows = exchange([model.project(camera) for camera in torch.cat(cameras)], group)
    values = [image_loss(rasterize(row), image) for row, image in zip(rows, images)]
    value = torch.stack(values).sum() / CAMERAS + model.regularization()
    value.backward()
    return value.detach()


def shard(name):
    return lambda whole: whole[dist.get_rank() :: dist.get_world_size()]


generator = torch.Generator().manual_seed(253)


def views():
    turn = torch.rand(CAMERAS, 1, generator=generator, dtype=torch.float64) * 6
    shift = torch.randn(CAMERAS, 3, generator=generator, dtype=torch.float64) * 0.3
    shift[:, 2] += 4
    images = torch.rand(CAMERAS, SIDE, SIDE, 3, generator=generator, dtype=torch.float64)
    return torch.cat([turn, shift], dim=1), images


batches = [views() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="world",
    ranks=3,
    shard=shard,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3, eps=1e-15),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
