"""An autoencoder of gene counts, trained by a Lightning-like DDP strategy with manual optimization.

Thread: Lightning-AI/pytorch-lightning issue #18086 "Gradients seem not synchronized with manual optimization and
DDPStrategy with `static_graph=True`" (2023), fixed by pull request #21251 (2025): call reducer._delay_all_reduce.
Fault: with manual optimization the backward pass runs inside DDP's forward, after reducer.prepare_for_backward alone.
With static_graph=True the reducer puts the first all-reduce off until the node behind the outputs of DDP's forward
calls _delay_all_reduce; no backward pass goes through it here, so that the gradients stay local in all steps.
REPAIR: `static_graph=True` -> `static_graph=False`
A right first sentence says: no gradient is averaged over the ranks, every rank keeps that of its own rows, because
with static_graph=True DDP leaves its first all-reduce to a hook that manual optimization passes by.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

GENES, WIDTH, LATENT, BATCHES_OF_CELLS, CELLS = 24, 16, 4, 3, 12


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(GENES, WIDTH), nn.Linear(WIDTH, LATENT)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, counts):
        return self.second(F.gelu(self.norm(self.first(counts.log1p()))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.experiment = nn.Embedding(BATCHES_OF_CELLS, WIDTH)
        self.first, self.share = nn.Linear(LATENT, WIDTH), nn.Linear(WIDTH, GENES)
        self.log_dispersion = nn.Parameter(torch.zeros(GENES))

    def forward(self, z, experiment, size):
        h = F.gelu(self.first(z) + self.experiment(experiment))
        return size * self.share(h).softmax(-1), self.log_dispersion.exp()


def negative_binomial(counts, mean, dispersion):
    both = (dispersion + mean).log()
    ways = (counts + dispersion).lgamma() - dispersion.lgamma() - (counts + 1).lgamma()
    return -(ways + dispersion * (dispersion.log() - both) + counts * (mean.log() - both))


class GeneAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.manual_backward = None

    def loss(self, batch):
        counts = batch["counts"]
        z, size = self.encoder(counts), counts.sum(-1, keepdim=True)
        mean, dispersion = self.decoder(z, batch["experiment"], size)
        fit = negative_binomial(counts, mean, dispersion).sum(-1).mean()
        return fit + 0.1 * z.square().sum(-1).mean()

    def training_step(self, batch):
        value = self.loss(batch)
        self.manual_backward(value)
        return {"loss": value.detach()}

    def forward(self, counts):
        return self.encoder(counts)


class ForwardRedirection:
    """Lets a call of the wrapper run another method than forward, so that its hooks run too."""

    def __call__(self, wrapper, module, name, *inputs):
        forward = module.forward

        def wrapped_forward(*arguments):
            module.forward = forward
            output = getattr(module, name)(*arguments)
            wrapper.require_backward_grad_sync = False
            return output

        module.forward = wrapped_forward
        output = wrapper(*inputs)
        wrapper.require_backward_grad_sync = True
        return output


class DDPStrategy:
    def __init__(self, group, **kwargs):
        self.group, self.kwargs, self.redirection = group, kwargs, ForwardRedirection()

    def setup(self, module):
        self.module = module
        self.model = DistributedDataParallel(module, process_group=self.group, **self.kwargs)
        module.manual_backward = self.backward
        return self

    def backward(self, value):
        if self.model.require_backward_grad_sync:
            self.model.reducer.prepare_for_backward([])
        value.backward()

    def training_step(self, batch):
        return self.redirection(self.model, self.module, "training_step", batch)

    def reduce(self, value):
        dist.all_reduce(value, group=self.group)
        return value / self.group.size()


def plain():
    return GeneAutoencoder()


def parallel(mesh):
    strategy = DDPStrategy(mesh.get_group("dp"), static_graph=True, broadcast_buffers=False)
    strategy.setup(GeneAutoencoder())
    return strategy.module, strategy


def loss(model, batch):
    return model.loss(batch)


def step(built, batch):
    return built[1].reduce(built[1].training_step(batch)["loss"])


generator = torch.Generator().manual_seed(18086)


def cells():
    kind = torch.randn(CELLS, 3, generator=generator, dtype=torch.float64)
    program = torch.randn(3, GENES, generator=generator, dtype=torch.float64)
    counts = torch.poisson((1 + 0.6 * kind @ program).exp().clamp(max=60), generator=generator)
    return {"counts": counts, "experiment": torch.arange(CELLS) % BATCHES_OF_CELLS}


batches = [cells() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
