"""Wear of machine tools from vibration, adapted from the labelled source machine to another by gradient reversal. Two
ranks read the source domain, one the target domain.

Thread: facebookresearch/DomainBed issue #143 "DANN Gradient Reversal Layer Missing" (2023): the discriminator
descends and the features ascend the same loss, by a reversed gradient or by its equal.
Correct: the ranks hold different losses, and modules that others do not use: on the target's rank the classifier and
the source's scaling have no gradient at all, on the others the target's scaling. They enter the sum as zeros, in the
order of the module, which is the same on all ranks. Each loss is a sum over own rows divided by the rows of its
domain (both ranks' together for the source), so the gradients must be summed and not averaged over three. The sign is
reversed once, between features and discriminator, before the sum over ranks, which is linear; the discriminator's own
gradients are not.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

SAMPLES, CHANNELS, WIDTH, CLASSES = 24, 2, 10, 4
SOURCE, TARGET, STRENGTH = 13, 9, 0.3


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(CHANNELS, WIDTH, 5)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.norm = nn.GroupNorm(2, WIDTH, affine=False)
        self.scale = nn.ParameterDict(
            {domain: nn.Parameter(torch.ones(2, WIDTH, 1)) for domain in ("source", "target")}
        )

    def forward(self, signal, domain):
        scale, shift = self.scale[domain]
        x = self.norm(self.first(signal)) * scale + shift - 1.0
        return F.gelu(self.second(F.gelu(x))).mean(-1)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.classifier = Features(), nn.Linear(WIDTH, CLASSES)
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def source_loss(self, signal, wear):
        x = self.features(signal, "source")
        domain = F.softplus(-self.discriminator(Reverse.apply(x, STRENGTH))).sum()
        return (F.cross_entropy(self.classifier(x), wear, reduction="sum") + domain) / SOURCE

    def target_loss(self, signal):
        x = self.features(signal, "target")
        return F.softplus(self.discriminator(Reverse.apply(x, STRENGTH))).sum() / TARGET


def loss(model, batch):
    return model.source_loss(batch["source"], batch["wear"]) + model.target_loss(batch["target"])


class DomainTrainer:
    def __init__(self, model, group):
        self.model, self.group = model, group

    def step(self, batch):
        if "target" in batch:
            value = self.model.target_loss(batch["target"])
        else:
            value = self.model.source_loss(batch["source"], batch["wear"])
        value.backward()
        self.sum_gradients()
        return value.detach()

    def sum_gradients(self):
        parameters = list(self.model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=self.group)
        parts = torch._utils._unflatten_dense_tensors(flat, gradients)
        for parameter, part in zip(parameters, parts):
            parameter.grad = part


def plain():
    return Adapted()


def parallel(mesh):
    model = Adapted()
    return model, DomainTrainer(model, mesh.get_group("machine"))


def step(built, batch):
    return built[1].step(batch)


def by_domain(batch, mesh):
    rank = mesh.get_local_rank("machine")
    if rank == 2:
        return {"target": batch["target"]}
    return {name: batch[name].chunk(2)[rank] for name in ("source", "wear")}


generator = torch.Generator().manual_seed(143)
time = torch.arange(SAMPLES, dtype=torch.float64)


def vibrations(rows, hum):
    wear = torch.randint(CLASSES, (rows,), generator=generator)
    phase = torch.rand(rows, CHANNELS, 1, generator=generator, dtype=torch.float64)
    signal = torch.sin((0.4 + 0.3 * wear[:, None, None]) * time + 6 * phase)
    return signal + hum * torch.cos(1.9 * time + phase), wear


def both():
    source, wear = vibrations(SOURCE, 0.1)
    return {"source": source, "wear": wear, "target": vibrations(TARGET, 0.8)[0]}


batches = [both() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=by_domain,
    ranks={"machine": 3},
    optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=2e-3, momentum=0.5),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
