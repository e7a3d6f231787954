"""A learned solver of heat flow on a plate that is cut into strips of five, two and three rows; neighbours exchange single rows.

Might be accused because: the ranks have different numbers of rows, the outer ranks get zeros where inner ones get a neighbour's
row, gradients are summed over the ranks and not averaged, and only one of the ranks counts the penalty on the conductivity.
Correct because: a rank's loss is the sum over its own points divided by all points of the plate, and the penalty belongs to the
loss once, so parts of loss and gradient add up to the whole; the plate's rim is padded with zeros in the plain model as well.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

HEIGHT, LENGTH, WIDTH, STEPS, ROWS, PENALTY = 10, 6, 8, 2, 3, 0.1
STRIPS = (5, 2, 3)


class NeighbourRows(torch.autograd.Function):
    """Adds one row above and one below: the neighbours', or zeros outside of the plate."""

    @staticmethod
    def swap(top, bottom, group):
        """Sends the top row up and the bottom row down; returns what comes from there."""
        edges = [torch.empty_like(torch.stack([top, bottom])) for _ in STRIPS]
        dist.all_gather(edges, torch.stack([top, bottom]), group=group)
        rank, nothing = dist.get_rank(group), torch.zeros_like(top)
        above = edges[rank - 1][1] if rank > 0 else nothing
        below = edges[rank + 1][0] if rank + 1 < len(STRIPS) else nothing
        return above, below

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        above, below = NeighbourRows.swap(x[:, :, :1], x[:, :, -1:], group)
        return torch.cat([above, x, below], dim=2)

    @staticmethod
    def backward(ctx, grad):
        above, below = NeighbourRows.swap(grad[:, :, :1], grad[:, :, -1:], ctx.group)
        grad = grad[:, :, 1:-1].clone()
        grad[:, :, :1] += above
        grad[:, :, -1:] += below
        return grad, None


class PlateConv(nn.Conv2d):
    def forward(self, x, group):
        if group is None:
            x = F.pad(x, (0, 0, 1, 1))
        else:
            x = NeighbourRows.apply(x, group)
        return super().forward(F.pad(x, (1, 1, 0, 0)))


class HeatSolver(nn.Module):
    """Repeats one explicit step, whose conductivity depends on the material around a point."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.sense, self.flow = PlateConv(2, WIDTH, 3), PlateConv(WIDTH, 1, 3)
        self.conductivity = nn.Parameter(torch.full((WIDTH, 1, 1), 0.5))

    def forward(self, heat, material):
        for _ in range(STEPS):
            x = torch.tanh(self.sense(torch.cat([heat, material], dim=1), self.group))
            heat = heat + self.flow(x * self.conductivity, self.group)
        return heat


def part_of_loss(model, batch, with_penalty):
    error = (model(batch["heat"], batch["material"]) - batch["later"]).square().sum()
    error = error / (ROWS * HEIGHT * LENGTH)
    penalty = PENALTY * model.conductivity.square().sum()
    return error + penalty * with_penalty


def plain():
    return HeatSolver()


def parallel(mesh):
    return HeatSolver(mesh.get_group("strip"))


def loss(model, batch):
    return part_of_loss(model, batch, with_penalty=True)


def step(model, batch):
    value = part_of_loss(model, batch, with_penalty=dist.get_rank(model.group) == 0)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=model.group)
    value = value.detach().clone()
    dist.all_reduce(value, group=model.group)
    return value


def split(batch, mesh):
    rank = mesh.get_local_rank("strip")
    return {name: field.split(STRIPS, dim=2)[rank] for name, field in batch.items()}


generator = torch.Generator().manual_seed(523)


def plates():
    heat = torch.randn(ROWS, 1, HEIGHT, LENGTH, generator=generator, dtype=torch.float64)
    material = torch.rand(ROWS, 1, HEIGHT, LENGTH, generator=generator, dtype=torch.float64)
    later = heat + 0.2 * material * (F.avg_pool2d(heat, 3, stride=1, padding=1) - heat)
    return {"heat": heat, "material": material, "later": later}


batches = [plates() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"strip": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
