"""A solubility regressor under FSDP2 with Prodigy, whose estimate of the step size is summed over all shards.

Thread: konstmish/prodigy, file prodigyopt/prodigy.py: with fsdp_in_use the numerator and the denominator of the
distance estimate are added up over the ranks before they are divided.
Correct: the scalar products and the sums of absolute values are sums over the elements, and every element lies in one
shard, so that the two sums are those of the whole model; all ranks then take the same step size. The optimizer works on
the local tensors behind the DTensors. Only whole rows are shared out: of the last layer's single row the second rank
has nothing, and of three rows it has one. Empty shards add zero. Only the sum of the new terms is reduced; the old
numerator is the whole one already.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import titanlite

ATOMS, KINDS, WIDTH, ROWS = 7, 9, 16, 12


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Prodigy(torch.optim.Optimizer):
    def __init__(
        self, params, betas=(0.9, 0.99), weight_decay=0.0, d0=1e-3, d_coef=4.0, group=None
    ):
        super().__init__(params, dict(lr=1.0, betas=betas, eps=1e-8, weight_decay=weight_decay))
        self.d0, self.d, self.d_coef = d0, d0, d_coef
        self.numerator, self.process_group = 0.0, group

    def with_gradients(self):
        for options in self.param_groups:
            for p in options["params"]:
                if p.grad is not None:
                    yield options, local(p.data), local(p.grad), self.state[p]

    @torch.no_grad()
    def step(self, closure=None):
        d, sums = self.d, torch.zeros(2)
        for options, p, grad, state in self.with_gradients():
            beta1, beta2 = options["betas"]
            beta3, scale = math.sqrt(beta2), d / self.d0 * d * options["lr"]
            if not state:
                state["start"] = p.clone()
                for name in ("s", "exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p)
            sums[0] += scale * torch.dot(grad.flatten(), (state["start"] - p).flatten())
            state["exp_avg"].mul_(beta1).add_(grad, alpha=d * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=d * d * (1 - beta2))
            sums[1] += state["s"].mul_(beta3).add_(grad, alpha=scale).abs().sum()
        if self.process_group is not None:
            dist.all_reduce(sums, group=self.process_group)
        self.numerator = self.numerator * beta3 + sums[0].item()
        self.d = max(d, self.d_coef * self.numerator / sums[1].item())
        for options, p, _, state in self.with_gradients():
            denominator = state["exp_avg_sq"].sqrt().add_(self.d * options["eps"])
            p.mul_(1 - options["weight_decay"] * d * options["lr"])
            p.addcdiv_(state["exp_avg"], denominator, value=-d * options["lr"])


class MessageLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.send, self.keep = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.bond_weights = nn.Parameter(torch.tensor([0.2, 0.5, 1.0]))

    def forward(self, x, bonds):
        weights = F.pad(self.bond_weights, (1, 0))[bonds]
        return x + torch.tanh(self.keep(x) + weights @ self.send(x))


class Solubility(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, WIDTH)
        self.layers = nn.ModuleList(MessageLayer() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, kinds, bonds):
        x = self.kinds(kinds)
        for layer in self.layers:
            x = layer(x, bonds)
        return self.out(self.norm(x).mean(1)).squeeze(-1)


def plain():
    return Solubility()


def parallel(mesh):
    model = Solubility()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, Prodigy(model.parameters(), weight_decay=0.02, group=mesh.get_group())


def loss(model, batch):
    return F.huber_loss(model(batch["kinds"], batch["bonds"]), batch["solubility"])


generator = torch.Generator().manual_seed(2306)


def molecules():
    bonds = torch.randint(-4, 4, (ROWS, ATOMS, ATOMS), generator=generator).clamp(min=0).triu(1)
    return {
        "kinds": torch.randint(0, KINDS, (ROWS, ATOMS), generator=generator),
        "bonds": bonds + bonds.transpose(1, 2),
        "solubility": torch.randn(ROWS, generator=generator, dtype=torch.float64) - 3,
    }


batches = [molecules() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="fsdp",
    ranks={"fsdp": 2},
    optimizer=lambda parameters: Prodigy(parameters, weight_decay=0.02),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
