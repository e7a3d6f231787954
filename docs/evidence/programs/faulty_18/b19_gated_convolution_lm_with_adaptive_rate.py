"""A language model of gated causal convolutions under FSDP2, trained by an Adam that finds its own step size (as Prodigy does).

Thread: facebookresearch/dadaptation pull request #19 "Fully-sharded data parallel support" (2023): with sharded parameters, the
statistics behind the global learning rate have to be synchronized across the processes.
Fault: AdaptiveAdam.step sums the numerator and the denominator of its estimate d over the rank's own shards and doesn't reduce
them, so each rank computes an own step size from its part of the parameters.
REPAIR: `totals = torch.stack([numerator, denominator])` -> `totals = self.over_shards(torch.stack([numerator, denominator]))`
A right first sentence says: the optimizer's global statistics (numerator and denominator of the estimated step size d) are
summed over each rank's shards only, without an all-reduce, so the ranks use different and wrong step sizes as soon as d grows.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import titanlite

VOCAB, WIDTH, KERNEL, LAYERS, LENGTH, ROWS = 24, 14, 3, 3, 10, 8


class GatedConvolution(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.padding = (KERNEL - 1) * dilation
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, KERNEL, dilation=dilation)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = F.pad(self.norm(x).mT, (self.padding, 0))
        return x + self.out(F.glu(self.conv(y), dim=1).mT)


class ConvolutionLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(GatedConvolution(2**i) for i in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdaptiveAdam(torch.optim.Optimizer):
    """Adam with the step size d, estimated from the gradients and the distance to the start."""

    def __init__(self, parameters, lr=1.0, d0=1e-3, d_coef=2.0, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(parameters, dict(lr=lr, betas=betas, eps=eps))
        self.d0, self.d, self.d_coef, self.numerator = d0, d0, d_coef, 0.0
        sharded = [p for g in self.param_groups for p in g["params"] if isinstance(p, DTensor)]
        self.mesh = sharded[0].device_mesh if sharded else None

    def over_shards(self, values):
        if self.mesh is not None:
            dist.all_reduce(values, group=self.mesh.get_group())
        return values

    def moments(self, p, group):
        state, (b1, b2), x, g = self.state[p], group["betas"], local(p), local(p.grad)
        if not state:
            state["start"] = x.clone()
            for key in ("exp_avg", "exp_avg_sq", "s"):
                state[key] = torch.zeros_like(x)
        weight = self.d / self.d0 * self.d * group["lr"]
        state["exp_avg"].mul_(b1).add_(g, alpha=(1 - b1) * self.d)
        state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=(1 - b2) * self.d**2)
        state["s"].mul_(b2**0.5).add_(g, alpha=weight)
        return weight * (g * (state["start"] - x)).sum(), state["s"].abs().sum()

    @torch.no_grad()
    def step(self, closure=None):
        numerator = denominator = torch.zeros(())
        members = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for p, group in members:
            part, size = self.moments(p, group)
            numerator, denominator = numerator + part, denominator + size
        totals = torch.stack([numerator, denominator])
        b2, used = self.param_groups[0]["betas"][1], self.d
        self.numerator = b2**0.5 * self.numerator + totals[0].item()
        self.d = max(self.d, self.d_coef * self.numerator / totals[1].item())
        for p, group in members:
            state = self.state[p]
            scale = state["exp_avg_sq"].sqrt().add_(used * group["eps"])
            local(p).addcdiv_(state["exp_avg"], scale, value=-used * group["lr"])


def plain():
    return ConvolutionLM()


def parallel(mesh):
    model = ConvolutionLM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


generator = torch.Generator().manual_seed(19)


def texts():
    """Each word is mostly followed by the one five places further."""
    first = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
    noise = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    noise = noise * (torch.rand(ROWS, LENGTH + 1, generator=generator) < 0.2)
    return (first + 5 * torch.arange(LENGTH + 1) + noise) % VOCAB


batches = [texts() for _ in range(6)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, split="dp", ranks={"dp": 2}, optimizer=AdaptiveAdam)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
