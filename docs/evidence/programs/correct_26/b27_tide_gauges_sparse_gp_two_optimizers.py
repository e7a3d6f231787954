"""A sparse Gaussian process with a learned kernel under DDP; natural gradients for q(u), Adam for everything else.

Thread: cornellius-gp/gpytorch pull request #1258 "Natural gradient descent v3" (2020): two optimizers, and the natural
parameters can only be used "with SGD, or other optimizers that follow exactly the gradient direction"; with issue #518
on num_data.
What could be accused: each rank adds the whole divergence of q(u) to the mean over its own rows, the rows stand for a
data set four times as large, hence the 1 / num_data, the network's rate is another than the kernel's, and q(u) is
stepped by another rule than the parameters whose moments Adam keeps; but DDP's mean of two equal divergences is the
divergence, and nothing is stepped by both rules.
"""

import math

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

INPUTS, WIDTH, LATENT, INDUCING, ROWS, NUM_DATA, JITTER = 4, 10, 2, 7, 16, 64, 1e-4


class DeepKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, LATENT), nn.Tanh()
        )
        self.log_lengths = nn.Parameter(torch.zeros(LATENT))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        difference = (a.unsqueeze(1) - b.unsqueeze(0)) / self.log_lengths.exp()
        return self.log_scale.exp() * (-0.5 * difference.square().sum(-1)).exp()


class SparseGp(nn.Module):
    """Hensman's bound for one minibatch, q(u) whitened."""

    def __init__(self):
        super().__init__()
        self.kernel = DeepKernel()
        self.inducing = nn.Parameter(2 * torch.rand(INDUCING, LATENT) - 1)
        self.log_noise = nn.Parameter(torch.tensor(-1.0))
        self.q_mean = nn.Parameter(0.1 * torch.randn(INDUCING))
        self.q_root = nn.Parameter(torch.eye(INDUCING))

    def predict(self, x):
        features = self.kernel.network(x)
        prior = self.kernel(self.inducing, self.inducing) + JITTER * torch.eye(INDUCING)
        cross = self.kernel(self.inducing, features)
        whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(prior), cross, upper=False)
        spread = self.q_root.tril().t() @ whitened
        variance = self.kernel.log_scale.exp() - whitened.square().sum(0) + spread.square().sum(0)
        return self.q_mean @ whitened, variance

    def divergence(self):
        root = self.q_root.tril()
        log_determinant = root.diagonal().square().log().sum()
        return 0.5 * (root.square().sum() + self.q_mean.square().sum() - INDUCING - log_determinant)

    def forward(self, x, y):
        mean, variance = self.predict(x)
        misfit = ((y - mean).square() + variance) / self.log_noise.exp()
        expected = -0.5 * (misfit + self.log_noise + math.log(2 * math.pi))
        return self.divergence() / NUM_DATA - expected.mean()


class NaturalAndAdam(torch.optim.Optimizer):
    """Two optimizers behind one step: NGD on the natural parameters, Adam on the others."""

    def __init__(self, parameters, natural_rate=0.2, rate=1e-2, network_rate=3e-3):
        groups = {"natural": [], "network": [], "kernel": []}
        for p in parameters:
            groups[self.kind(p)].append(p)
        rates = {"natural": natural_rate, "network": network_rate, "kernel": rate}
        super().__init__(
            [{"params": group, "lr": rates[kind], "kind": kind} for kind, group in groups.items()],
            {"betas": (0.9, 0.99), "eps": 1e-8},
        )

    @staticmethod
    def kind(p):
        """By shape, as nothing else has one row or column per inducing point at its end."""
        columns = p.shape[-1] if p.dim() else 1
        if columns == INDUCING:
            return "natural"
        return "network" if p.dim() == 2 and columns in (INPUTS, WIDTH) else "kernel"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if group["kind"] == "natural":
                    p.sub_(group["lr"] * p.grad)
                else:
                    self.adam(p, self.state[p], group)

    def adam(self, p, state, group):
        if not state:
            state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        state["step"] += 1
        (b1, b2), step = group["betas"], state["step"]
        state["mean"].lerp_(p.grad, 1 - b1)
        state["square"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        scale = (state["square"] / (1 - b2**step)).sqrt() + group["eps"]
        p.sub_(group["lr"] / (1 - b1**step) * state["mean"] / scale)


def plain():
    return SparseGp()


def parallel(mesh):
    return DistributedDataParallel(SparseGp(), process_group=mesh.get_group("dp"))


def loss(model, batch):
    return model(batch["x"], batch["height"])


generator = torch.Generator().manual_seed(1258)


def gauges():
    x = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)
    height = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    return {"x": x, "height": height}


batches = [gauges() for _ in range(4)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, split="dp", ranks={"dp": 2}, optimizer=NaturalAndAdam)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
