"""A trainer that skips the update on the rank whose own loss is a spike.

Thread: https://github.com/Lightning-AI/pytorch-lightning/pull/5359 "Handle invalid training_step losses in
DDP", 2021-01-05.
Wrong: each rank decides by its own loss whether it calls optimizer.step(). In the second batch, rank 1
skips it and rank 0 does not.
A right diagnosis says: gradients agree on all ranks, but after step 2 the weights of rank 1 are those of
before: rank 1 made no update. Replicas differ from then on.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

SPIKE = 10.0


class SkippingAdam(torch.optim.Adam):
    """Adam that leaves out the step if the last loss was no good one."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2)
        self.last_loss = torch.zeros(())

    def step(self, closure=None):
        if torch.isfinite(self.last_loss) and self.last_loss < SPIKE:
            super().step()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 10, batch_first=True)
        self.out = nn.Linear(10, 2)

    def forward(self, series):
        return self.out(self.cell(series)[0][:, -1])


def loss(model, batch):
    return mse_loss(model(batch["series"]), batch["next"])


def configure():
    model = DistributedDataParallel(Forecaster())
    return model, SkippingAdam(model.parameters())


def training_step(built, batch):
    model, optimizer = built
    value = loss(model, batch)
    value.backward()
    optimizer.last_loss = value.detach()
    return value


generator = torch.Generator().manual_seed(53)
batches = [
    {
        "series": torch.randn(8, 5, 4, generator=generator),
        "next": torch.randn(8, 2, generator=generator),
    }
    for _ in range(3)
]
batches[1]["next"][6] += 7.0  # an outlier: a loss of about 12 on rank 1, and 7 in the mean

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=training_step)
    print(titanlite.compare(Forecaster, configure, optimizer=SkippingAdam, **options))
