"""Glow under DDP: activation normalization is initialized in the first forward pass, on each rank from its own rows.

Thread: https://github.com/rosinality/glow-pytorch/issues/2 "Data Parallel" ("As ActNorm uses individual batch to
calculate statistics and initialize the parameter using it"), 2018-12-16.
Wrong: DDP sends the weights of rank 0 when it wraps the model, before they are set. In step 1, every rank sets loc
and log_scale from its own half of the batch. So the replicas differ from then on, and no reduction makes them equal
again.
EXPECT: in the forward pass of step 1, the output of flow.0.actnorm is the first that differs, on all ranks: its
parameters loc and log_scale are initialized from the rank's own rows, so the replicas differ (they are not equal on
the ranks). Initialize from statistics reduced over dp, or before DDP sends the weights.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

CHANNELS, HIDDEN = 6, 16


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(CHANNELS))
        self.log_scale = nn.Parameter(torch.zeros(CHANNELS))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    @torch.no_grad()
    def initialize(self, x):
        mean, std = x.mean(0), x.std(0, unbiased=False)
        self.loc.copy_(-mean)
        self.log_scale.copy_(-torch.log(std + 1e-6))
        self.initialized.fill_(1)

    def forward(self, x):
        if self.initialized == 0:
            self.initialize(x)
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()


class InvertibleLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(CHANNELS, CHANNELS))[0])

    def forward(self, x):
        return x @ self.weight, torch.linalg.slogdet(self.weight)[1]


class AffineCoupling(nn.Module):
    def __init__(self):
        super().__init__()
        half = CHANNELS // 2
        self.net = nn.Sequential(nn.Linear(half, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CHANNELS))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        return torch.cat([a, (b + t) * s], 1), s.log().sum(1)


class FlowStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.actnorm, self.mix, self.coupling = ActNorm(), InvertibleLinear(), AffineCoupling()

    def forward(self, x):
        x, first = self.actnorm(x)
        x, second = self.mix(x)
        x, third = self.coupling(x)
        return x, first + second + third


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        self.flow = nn.ModuleList(FlowStep() for _ in range(3))

    def forward(self, x):
        log_det = 0.0
        for step in self.flow:
            x, part = step(x)
            log_det = log_det + part
        return 0.5 * x.square().sum(1) - log_det


def loss(model, batch):
    return model(batch["x"]).mean()


def parallel(mesh):
    return DistributedDataParallel(
        Glow(), process_group=mesh.get_group("dp"), broadcast_buffers=False
    )


generator = torch.Generator().manual_seed(2)
batches = [{"x": 1.0 + 2.0 * torch.randn(16, CHANNELS, generator=generator)} for _ in range(3)]
arguments = Glow, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
