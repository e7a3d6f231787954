"""Regression of the hardness of alloys from their composition; the rows of a batch are a DTensor over the ranks.

Thread: pytorch/pytorch issue #110762 "[DTensor] DTensor.from_local() creates DTensor with wrong .shape/.size() for
un-even sharding case" (2023): the global size is taken to be the local size times the number of ranks.
Fault: shard_rows makes DTensors of the rank's rows by from_local without shape and stride; nine rows are five and four
on two ranks, which take the batch for ten and for eight rows, so the mean over the batch weighs the ranks alike.
REPAIR: `[Shard(0)])` -> `[Shard(0)], shape=rows.shape, stride=rows.stride())`
A right first sentence says: from_local infers a wrong global number of rows where the batch isn't divisible by the
ranks, so the mean of the loss is the mean of the ranks' means and not of the rows; loss and all gradients are wrong.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_module

import titanlite

ELEMENTS, TREATMENTS, WIDTH, BLOCKS, ROWS = 7, 4, 16, 2, 9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class HardnessModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.composition = nn.Linear(ELEMENTS, WIDTH)
        self.treatment = nn.Linear(TREATMENTS, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, composition, treatment):
        x = self.composition(composition) + self.treatment(treatment)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def squared_error(model, batch):
    """Vickers and Brinell hardness, the error relative to the uncertainty of each measurement."""
    predicted = model(batch["composition"], batch["treatment"])
    return ((predicted - batch["hardness"]) * batch["precision"]).square().mean()


def shard_rows(rows, mesh):
    """The rank's rows as a shard of the batch; each rank would read only these from the file."""
    local = rows.tensor_split(mesh.size())[mesh.get_local_rank()]
    return DTensor.from_local(local, mesh, [Shard(0)])


class HardnessTrainer:
    def __init__(self, model, mesh):
        self.model, self.mesh = model, mesh

    def training_step(self, batch):
        batch = {name: shard_rows(rows, self.mesh) for name, rows in batch.items()}
        value = squared_error(self.model, batch)
        value.backward()
        return value.detach().full_tensor()


def plain():
    return HardnessModel()


def parallel(mesh):
    model = distribute_module(HardnessModel(), mesh["dp"])
    return model, HardnessTrainer(model, mesh["dp"])


def loss(model, batch):
    return squared_error(model, batch)


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(110762)


def alloys():
    composition = torch.rand(ROWS, ELEMENTS, generator=generator, dtype=torch.float64)
    composition = composition / composition.sum(1, keepdim=True)
    treatment = torch.rand(ROWS, TREATMENTS, generator=generator, dtype=torch.float64)
    vickers = composition[:, 0] * 3 - composition[:, 1] + treatment[:, 0] * treatment[:, 1]
    brinell = 0.9 * vickers + 0.2 * composition[:, 2]
    precision = 0.5 + torch.rand(ROWS, 2, generator=generator, dtype=torch.float64)
    return {
        "composition": composition,
        "treatment": treatment,
        "hardness": torch.stack([vickers, brinell], 1),
        "precision": precision,
    }


batches = [alloys() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
