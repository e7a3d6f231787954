"""A classifier of bird calls on a pretrained convolutional feature encoder which is to train slowly, under FSDP2.

Thread: meta-pytorch/torchrec pull request #4268 "switch PARAM_GRAD bwd hook to register_post_accumulate_grad_hook
(FSDP2 support)" (2026): under fully_shard no AccumulateGrad node ever belongs to the DTensor parameter, its gradient is
assigned by FSDP, so any register_hook on it "silently never fires".
Fault: damp_gradients puts a Tensor.register_hook on each parameter of the feature encoder; after fully_shard these are
DTensors whose hooks are never called, so the encoder gets ten times the gradient that it gets in one process.
REPAIR: `register_hook(lambda grad: grad * scale)` -> `register_post_accumulate_grad_hook(lambda p: p.grad.mul_(scale))`
A right first sentence says: hooks by register_hook on FSDP2's sharded parameters never fire, so the gradients of the
feature encoder aren't multiplied by 0.1 and are ten times too large; those of the context network and head are right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

SAMPLES, CHANNELS, WIDTH, HEADS, SPECIES, ROWS = 64, 8, 16, 2, 5, 8
GRAD_MULT = 0.1


class GradMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class FeatureEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv1d(1, CHANNELS, 4, stride=2), nn.Conv1d(CHANNELS, WIDTH, 4, stride=2)]
        )
        self.norms = nn.ModuleList([nn.GroupNorm(2, CHANNELS), nn.GroupNorm(2, WIDTH)])

    def forward(self, sound):
        x = sound.unsqueeze(1)
        for conv, norm in zip(self.convs, self.norms):
            x = F.gelu(norm(conv(x)))
        return x.transpose(1, 2)


class ContextLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class BirdCalls(nn.Module):
    """grad_mult is 1 where something else takes care of the encoder's gradients."""

    def __init__(self, grad_mult=GRAD_MULT):
        super().__init__()
        self.encoder = FeatureEncoder()
        self.layers = nn.ModuleList(ContextLayer() for _ in range(2))
        self.head, self.grad_mult = nn.Linear(WIDTH, SPECIES), grad_mult

    def forward(self, sound):
        x = self.encoder(sound)
        if self.grad_mult != 1.0:
            x = GradMultiply.apply(x, self.grad_mult)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def damp_gradients(module, scale):
    """Per parameter, since FSDP's modules want no custom function between them."""
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: grad * scale)


def plain():
    return BirdCalls()


def parallel(mesh):
    model = BirdCalls(grad_mult=1.0)
    for module in (model.encoder, *model.layers):
        fully_shard(module, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    damp_gradients(model.encoder, GRAD_MULT)
    return model, mesh["dp"]


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["sound"]), batch["present"])


def step(built, batch):
    model, mesh = built
    value = loss(model, batch)
    value.backward()
    reported = value.detach().clone()
    dist.all_reduce(reported, group=mesh.get_group())
    return reported / mesh.size()


generator = torch.Generator().manual_seed(4268)
time = torch.arange(SAMPLES, dtype=torch.float64)


def recordings():
    present = (torch.rand(ROWS, SPECIES, generator=generator) < 0.4).double()
    pitch = 0.2 + 0.25 * torch.arange(SPECIES, dtype=torch.float64)
    calls = (present.unsqueeze(-1) * torch.sin(pitch.unsqueeze(-1) * time)).sum(1)
    noise = torch.randn(ROWS, SAMPLES, generator=generator, dtype=torch.float64)
    return {"sound": calls + 0.2 * noise, "present": present}


batches = [recordings() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
