"""Langevin dynamics with data parallelism by hand: only the first rank adds noise to its gradients before they are summed.

Thread: of the kind meta-pytorch/opacus pull request #196 "DDP support for faster distributed training" (2021): "Only one GPU adds
noise".
Correct: the optimizer sums the gradients, which are those of the rank's own rows until then, after the noise is added, so it is in
the sum once, on all ranks. The other ranks draw no noise; nothing else uses the generator.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, silu

import titanlite

FEATURES, WIDTH, SIGMA = 5, 8, 0.02


class Langevin(torch.optim.Optimizer):
    """Preconditioned by a moving average of the squares, as in pSGLD."""

    def __init__(self, parameters, ranks=1, rank=0):
        super().__init__(parameters, {"lr": 0.05, "decay": 0.9, "eps": 0.05})
        self.ranks, self.rank = ranks, rank
        self.generator = torch.Generator().manual_seed(11)

    def noisy(self, p):
        gradient = p.grad / self.ranks
        if self.rank == 0:
            gradient += SIGMA * torch.randn(p.shape, generator=self.generator)
        if self.ranks > 1:
            dist.all_reduce(gradient)
        return gradient

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                gradient, state = self.noisy(p), self.state[p]
                if "square" not in state:
                    state["square"] = torch.ones_like(p)
                state["square"].lerp_(gradient.square(), 1 - group["decay"])
                p -= group["lr"] * gradient / (state["square"].sqrt() + group["eps"])


class Posterior(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = silu(self.first(x))
        return self.last(x + silu(self.second(x)))[:, 0]


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Posterior()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return model, Langevin(model.parameters(), dist.get_world_size(), dist.get_rank())


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


rng = torch.Generator().manual_seed(426)
batches = [
    {
        "x": torch.randn(8, FEATURES, generator=rng),
        "y": torch.randint(2, (8,), generator=rng).float(),
    }
    for _ in range(4)
]
arguments = Posterior, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")
options["optimizer"] = Langevin

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
