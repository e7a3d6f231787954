"""A weather forecast model with the latitudes cut over the "h" ranks and the hidden features of its MLPs over the "matmul" ranks.

Thread: NVIDIA/makani pull request #103 "distributed parameter hook cleanup and fixes" (2026): the reduction hooks summed every
gradient over every group in is_shared_mp, too often where the ranks of a group hold identical copies (matmul > 1).
Fault: reduce_gradients sums the gradients of the shared parameters over "h" and also over "matmul"; over "h" they are parts, but
over "matmul" they are already the same on all ranks, so they come out multiplied by the number of "matmul" ranks.
REPAIR: `axes = parameter.shared_over` -> `axes = [axis for axis in parameter.shared_over if axis != "matmul"]`
A right first sentence says: gradients of the parameters that all "matmul" ranks hold alike are summed over "matmul" as well,
where they are identical copies, so they are twice too large (the factor is the size of that axis); the MLPs' cut weights are
right.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F

import titanlite

FIELDS, LAT, LON, WIDTH, HIDDEN, ROWS = 4, 8, 12, 8, 16, 2


def all_reduced(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduced(grad, ctx.group), None


def transposed(x, group, cut, join):
    """Cuts dimension `cut` over the group and joins dimension `join`."""
    sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
    received = dist_nn.all_to_all_single(torch.empty_like(sent), sent, group=group)
    return torch.cat(received.unbind(0), join)


def own(parameter, group, dim=0):
    parts = parameter.detach().chunk(dist.get_world_size(group), dim)
    return nn.Parameter(parts[dist.get_rank(group)].clone())


class LatitudeMixing(nn.Linear):
    """Mixes all latitudes at each longitude; the layout of x is (batch, lat, lon, features)."""

    group = None

    def forward(self, x):
        if self.group is not None:
            x = transposed(x, self.group, 2, 1)
        x = super().forward(x.transpose(1, 3)).transpose(1, 3)
        return x if self.group is None else transposed(x, self.group, 1, 2)


class MLP(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        if self.group is None:
            return self.fc2(F.gelu(self.fc1(x)))
        x = CopyToRanks.apply(x, self.group)
        y = self.fc2(F.gelu(self.fc1(x)))
        return y + (all_reduced(y.detach(), self.group) - y.detach())

    def cut(self, group):
        self.group = group
        self.fc1.weight, self.fc1.bias = own(self.fc1.weight, group), own(self.fc1.bias, group)
        self.fc2.weight = own(self.fc2.weight, group, 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixing, self.mlp = LatitudeMixing(LAT, LAT), MLP()

    def forward(self, x):
        x = x + self.mixing(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FIELDS, WIDTH), nn.Linear(WIDTH, FIELDS)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return x + self.decoder(self.blocks(self.encoder(x)))


def distribute(model, mesh):
    for block in model.blocks:
        block.mixing.group = mesh.get_group("h")
        block.mlp.cut(mesh.get_group("matmul"))
    cut = {p for block in model.blocks for p in block.mlp.parameters()}
    for parameter in model.parameters():
        parameter.shared_over = ["h"] if parameter in cut else ["h", "matmul"]
    model.mesh = mesh
    return model


def reduce_gradients(model):
    for parameter in model.parameters():
        axes = parameter.shared_over
        for axis in axes:
            parameter.grad = all_reduced(parameter.grad, model.mesh.get_group(axis))


def plain():
    return Forecast()


def parallel(mesh):
    return distribute(Forecast(), mesh)


def loss(model, batch):
    """The squared error, weighted by the area; a rank's part of it, for a part of the latitudes."""
    now, later, area = batch
    return ((model(now) - later).square() * area[:, :, None, None]).sum() / (ROWS * LON * FIELDS)


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    reduce_gradients(model)
    return all_reduced(value.detach(), model.mesh.get_group("h"))


generator = torch.Generator().manual_seed(103)
angles = (torch.arange(LAT, dtype=torch.float64) + 0.5) * torch.pi / LAT
areas = (angles.sin() / angles.sin().sum()).expand(ROWS, -1).clone()


def weather():
    now = torch.randn(ROWS, LAT, LON, FIELDS, generator=generator, dtype=torch.float64)
    return now, now.roll(1, 2) * 0.8 + now.roll(1, 1) * 0.2, areas


batches = [weather() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"h": 1},
    shard=lambda name: (int("fc2" in name), "matmul") if "mlp" in name else None,
    ranks={"h": 2, "matmul": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
