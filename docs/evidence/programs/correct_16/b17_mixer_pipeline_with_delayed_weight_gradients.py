"""An image mixer in two pipeline stages that computes the weight gradients after the input gradients (zero bubble style).

Correct because: the backward pass of DelayedLinear returns the input's gradient only and gives none for weight and bias, so
after backward() the linear layers have no gradients yet. It keeps input and output gradient of each microbatch, and flush()
computes all weight and bias gradients from them after the last microbatch; they are sums over the microbatches as ever. The
norms get their gradients in the ordinary way. The loss of a microbatch is its sum over the number of images of the whole
batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

PATCHES, WIDTH, CLASSES, LAYERS, MICROBATCHES = 6, 12, 5, 4, 4


class MixerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix1, self.mix2 = nn.Linear(PATCHES, 16), nn.Linear(16, PATCHES)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        y = self.norm1(x).transpose(1, 2)
        x = x + self.mix2(F.gelu(self.mix1(y))).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleDict({str(i): MixerLayer() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        if self.patch is not None:
            x = self.patch(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x).mean(dim=1))


class InputGradientOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, pending):
        ctx.save_for_backward(x, weight)
        ctx.pending = pending
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.pending.append((x.flatten(0, -2), grad.flatten(0, -2)))
        return grad @ weight, None, None, None


class DelayedLinear(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "pending"):
            self.pending = []
        return InputGradientOnly.apply(x, self.weight, self.bias, self.pending)

    @torch.no_grad()
    def flush(self):
        while self.pending:
            x, grad = self.pending.pop(0)
            for parameter, value in ((self.weight, grad.T @ x), (self.bias, grad.sum(0))):
                parameter.grad = value if parameter.grad is None else parameter.grad + value


def cut_stage(model, rank, stages):
    for index in range(LAYERS):
        if index * stages // LAYERS != rank:
            del model.layers[str(index)]
    if rank > 0:
        model.patch = None
    if rank < stages - 1:
        model.norm = model.head = None
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = DelayedLinear
    return model


class Pipeline:
    def __init__(self, model, group):
        self.model, self.rank, self.stages = model, dist.get_rank(group), dist.get_world_size(group)
        self.first, self.last = self.rank == 0, self.rank == self.stages - 1

    def run(self, images, labels):
        passes = []
        for x, y in zip(images.chunk(MICROBATCHES), labels.chunk(MICROBATCHES)):
            if not self.first:
                x = x.new_empty(*x.shape[:2], WIDTH)
                dist.recv(x, self.rank - 1)
                x.requires_grad_()
            out = self.model(x)
            if self.last:
                out = F.cross_entropy(out, y, reduction="sum") / len(labels)
            else:
                dist.send(out.detach().contiguous(), self.rank + 1)
            passes.append((x, out))
        for x, out in passes:
            grad = None
            if not self.last:
                grad = torch.empty_like(out)
                dist.recv(grad, self.rank + 1)
            out.backward(grad)
            if not self.first:
                dist.send(x.grad.contiguous(), self.rank - 1)
        for module in self.model.modules():
            if isinstance(module, DelayedLinear):
                module.flush()
        total = sum(out.detach() for _, out in passes) if self.last else images.new_zeros(())
        dist.broadcast(total, self.stages - 1)
        return total


def plain():
    return Mixer()


def parallel(mesh):
    group = mesh.get_group("pp")
    model = cut_stage(Mixer(), dist.get_rank(group), dist.get_world_size(group))
    return model, Pipeline(model, group)


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def step(built, batch):
    return built[1].run(*batch)


generator = torch.Generator().manual_seed(2401)
batches = [
    (
        torch.randn(8, PATCHES, 8, generator=generator, dtype=torch.float64),
        torch.randint(0, CLASSES, (8,), generator=generator),
    )
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"pp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
