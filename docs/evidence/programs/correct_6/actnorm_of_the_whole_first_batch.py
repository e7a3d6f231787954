"""Glow under DDP: activation normalization is initialized in the first forward pass, from moments of all ranks.

Thread: https://github.com/rosinality/glow-pytorch/issues/2 "Data Parallel" ("As ActNorm uses individual batch to
calculate statistics and initialize the parameter using it"), 2018-12-16.
Right: each layer all-reduces its moments before it sets loc and log_scale, so all ranks set the same values, those of
the whole batch.
Must not be accused: parameters that the forward pass of step 1 sets without a gradient, after DDP has sent the
weights of rank 0, and collectives in the first forward pass that later ones do not have.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

CHANNELS, HIDDEN = 6, 16


class ActNorm(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(CHANNELS))
        self.log_scale = nn.Parameter(torch.zeros(CHANNELS))
        self.register_buffer("initialized", torch.tensor(False))

    @torch.no_grad()
    def initialize(self, x):
        moments = torch.stack([x.sum(0), x.square().sum(0), torch.full((CHANNELS,), float(len(x)))])
        if self.group is not None:
            dist.all_reduce(moments, group=self.group)
        mean, square = moments[:2] / moments[2]
        self.loc.copy_(-mean)
        self.log_scale.copy_(-0.5 * torch.log(square - mean.square()))
        self.initialized.fill_(True)

    def forward(self, x):
        if not self.initialized:
            self.initialize(x)
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()


class AffineCoupling(nn.Module):
    def __init__(self):
        super().__init__()
        half = CHANNELS // 2
        self.net = nn.Sequential(nn.Linear(half, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CHANNELS))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        return torch.cat([(b + t) * s, a], 1), s.log().sum(1)


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(ActNorm() for _ in range(3))
        self.couplings = nn.ModuleList(AffineCoupling() for _ in range(3))

    def forward(self, x):
        log_det = 0.0
        for norm, coupling in zip(self.norms, self.couplings):
            x, first = norm(x)
            x, second = coupling(x)
            log_det = log_det + first + second
        return 0.5 * x.square().sum(1) - log_det


def loss(model, batch):
    return model(batch["x"]).mean()


def parallel(mesh):
    model = Glow()
    for norm in model.norms:
        norm.group = mesh.get_group("dp")
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


generator = torch.Generator().manual_seed(2)
batches = [{"x": 1.0 + 2.0 * torch.randn(16, CHANNELS, generator=generator)} for _ in range(3)]
arguments = Glow, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
