"""A physics-informed network for a damped string; the ranks have successive windows of time, with causal weights.

Thread: PredictiveIntelligenceLab/CausalPINNs issue #8 "Question about parallelized training" (2023); the mistake is
that of JuliaGPU/AcceleratedKernels.jl issue #127 "accumulate! with inclusive=false gives wrong answer" (2026): an
exclusive prefix sum in blocks, in which the running total carried out of a block lacks the block's last element.
Fault: CausalWeights.before makes the exclusive sums of the rank's slices of time and hands on the last of them as the
window's total, which leaves out the loss of the window's last slice: every later window has too small sums, so that
its weights exp(-eps * sum) are too large. Those of the first window are right.
REPAIR: `carry = sums[-1:].clone()` -> `carry = sums[-1:] + losses[-1:]`
A right first sentence says: the causal weights of all windows but the first are too large, since the total that a
rank gives to the later ones in CausalWeights.before is its last exclusive sum and lacks the loss of its last slice of
time.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn

import titanlite

SLICES, POINTS, WIDTH, SPEED, DAMPING = 12, 7, 16, 1.0, 0.2
EPS, START_WEIGHT = 0.004, 5.0


class ModifiedMlp(nn.Module):
    """Two encoders of the coordinates gate every layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, WIDTH), nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, t, x):
        waves = [f(k * math.pi * x) for k in (1, 2) for f in (torch.sin, torch.cos)]
        h = torch.stack([t, *waves], dim=-1)
        u, v = torch.tanh(self.first(h)), torch.tanh(self.second(h))
        for layer in self.layers:
            gate = torch.tanh(layer(h))
            h = gate * u + (1 - gate) * v
        return self.out(h).squeeze(-1)


def derivative(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def residual(model, t, x):
    t, x = t.clone().requires_grad_(), x.clone().requires_grad_()
    u = model(t, x)
    u_t, u_x = derivative(u, t), derivative(u, x)
    return derivative(u_t, t) + DAMPING * u_t - SPEED**2 * derivative(u_x, x)


class CausalWeights:
    """A slice of time counts when those before it are solved."""

    def __init__(self, eps, group=None):
        self.eps, self.group = eps, group

    def before(self, losses):
        """For every slice the sum of the losses of all earlier slices."""
        sums = torch.cumsum(losses, 0) - losses
        if self.group is not None:
            carry = sums[-1:].clone()
            carries = [torch.empty_like(carry) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(carries, carry, group=self.group)
            for earlier in carries[: dist.get_rank(self.group)]:
                sums = sums + earlier
        return sums

    @torch.no_grad()
    def __call__(self, losses):
        return torch.exp(-self.eps * self.before(losses))


def objective(model, causal, batch):
    losses = residual(model, batch["t"], batch["x"]).square().mean(1)
    weights = causal(losses.detach())
    shape = torch.sin(math.pi * batch["x0"])
    start = (model(torch.zeros_like(batch["x0"]), batch["x0"]) - shape).square().mean()
    return (weights * losses).mean() + START_WEIGHT * start


class WindowTrainer:
    def __init__(self, model, group):
        self.model, self.group, self.size = model, group, dist.get_world_size(group)
        self.causal = CausalWeights(EPS, group)

    def average(self, tensors):
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat, group=self.group)
        flat /= self.size
        for t, mean in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(mean.view_as(t))

    def step(self, batch):
        value = objective(self.model, self.causal, batch)
        value.backward()
        value = value.detach()
        self.average([p.grad for p in self.model.parameters()] + [value])
        return value


def plain():
    return ModifiedMlp()


def parallel(mesh):
    model = ModifiedMlp()
    return model, WindowTrainer(model, mesh.get_group("window"))


def loss(model, batch):
    return objective(model, CausalWeights(EPS), batch)


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(127)


def collocation():
    """Slices in the order of time, each with its own points; also points of the start."""
    edges = torch.arange(SLICES, dtype=torch.float64).unsqueeze(1)
    t = (edges + torch.rand(SLICES, 1, generator=generator, dtype=torch.float64)) / SLICES
    x = torch.rand(SLICES, POINTS, generator=generator, dtype=torch.float64)
    x0 = torch.rand(SLICES, 2, generator=generator, dtype=torch.float64)
    return {"t": t.expand(-1, POINTS).contiguous(), "x": x, "x0": x0}


batches = [collocation() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="window",
    ranks={"window": 4},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
