"""Latent adversarial training with one flat gradient buffer: zero_grad() takes the decoder's gradients out of it.

Thread: https://github.com/facebookresearch/fairscale/issues/354 "[ShardedDDP] Intercept zero_grad()" ("observe that
the grads are not a view of the buckets anymore"), 2021-02-03; set_to_none is the default since
https://github.com/pytorch/pytorch/pull/92731 (2023-01-20).
Wrong: a first backward pass looks for the worst latent, and what it left in the decoder is dropped by zero_grad().
The decoder's .grad become None, and the second backward pass makes new tensors. The all-reduce works on the flat
buffer, which holds zeros in their place.
EXPECT: the gradients of decoder.* (all parameters of the decoder) are not reduced over dp: each rank has that of its
own rows, while the encoder's agree. After decoder.zero_grad() (set_to_none), their .grad is no view of the flat
buffer that is all-reduced.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

INPUTS, DIM, EPSILON = 10, 6, 0.2


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(INPUTS, 16), nn.ELU(), nn.Linear(16, DIM))
        self.decoder = nn.Sequential(nn.Linear(DIM, 16), nn.ELU(), nn.Linear(16, INPUTS))

    def forward(self, x, offset):
        return self.decoder(self.encoder(x) + offset)


def worst_direction(grad):
    return EPSILON * grad / grad.norm(dim=1, keepdim=True)


def loss(model, batch):
    x = batch["x"]
    z = model.encoder(x).detach().requires_grad_()
    (grad,) = torch.autograd.grad(mse_loss(model.decoder(z), x), z)
    return mse_loss(model(x, worst_direction(grad)), x)


class FlatGradients:
    def __init__(self, module, group):
        self.group, self.parameters = group, list(module.parameters())
        self.sizes = [p.numel() for p in self.parameters]
        self.buffer = torch.zeros(sum(self.sizes))

    def prepare(self):
        self.buffer.zero_()
        for p, part in zip(self.parameters, self.buffer.split(self.sizes)):
            p.grad = part.view_as(p)

    def all_reduce(self):
        dist.all_reduce(self.buffer, group=self.group)
        self.buffer /= self.group.size()


def parallel(mesh):
    model = AutoEncoder()
    return model, FlatGradients(model, mesh.get_group("dp"))


def step(built, batch):
    model, flat = built
    x = batch["x"]
    flat.prepare()
    z = model.encoder(x).detach().requires_grad_()
    mse_loss(model.decoder(z), x).backward()
    model.decoder.zero_grad()
    value = mse_loss(model(x, worst_direction(z.grad)), x)
    value.backward()
    flat.all_reduce()
    return value.detach()


generator = torch.Generator().manual_seed(354)
batches = [{"x": torch.randn(8, INPUTS, generator=generator)} for _ in range(3)]
arguments = AutoEncoder, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
