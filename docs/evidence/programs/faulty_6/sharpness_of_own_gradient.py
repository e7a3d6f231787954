"""Sharpness-aware minimization under DDP: the first backward pass runs in no_sync, to save one all-reduce.

Thread: https://github.com/juntang-zhuang/GSAM/issues/5 "About the usage of function "maybe_no_sync" in gsam" ("If we
use 4 GPUs ... the gradients would be calculated based on 256 if we set no_sync"), 2022-06-15.
Wrong: the weights are moved along the gradient of the rank's own rows. So each rank takes its second gradient at
another point, and not at that of the whole batch.
EXPECT: the second forward pass of step 1 differs on every rank (embed or first layer first, its output differs
although its input agrees), and so do the loss and all gradients: the ranks perturb their weights by their own, not
reduced gradient (no_sync in the first backward pass). Synchronize the gradients before the perturbation.
"""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, CLASSES, RHO = 12, 10, 3, 0.3


class TextClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.fc1, self.norm, self.fc2 = nn.Linear(DIM, 24), nn.LayerNorm(24), nn.Linear(24, CLASSES)

    def forward(self, tokens):
        return self.fc2(self.norm(torch.tanh(self.fc1(self.embed(tokens).mean(1)))))


def criterion(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"])


def loss(model, batch):
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(criterion(model, batch), list(parameters.values()))
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    moved = {n: p + RHO * g / norm for (n, p), g in zip(parameters.items(), grads)}
    return criterion(lambda tokens: functional_call(model, moved, (tokens,)), batch)


class SAM:
    def __init__(self, parameters, rho):
        self.parameters, self.rho = list(parameters), rho

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.square().sum() for p in self.parameters]).sum().sqrt()
        self.old = [p.detach().clone() for p in self.parameters]
        for p in self.parameters:
            p.add_(p.grad, alpha=float(self.rho / norm))
            p.grad = None

    @torch.no_grad()
    def restore(self):
        for p, old in zip(self.parameters, self.old):
            p.copy_(old)


def create_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def parallel(mesh):
    model = DistributedDataParallel(TextClassifier(), process_group=mesh.get_group("dp"))
    return model, SAM(model.parameters(), RHO)


def step(built, batch):
    model, sam = built
    with model.no_sync():
        criterion(model, batch).backward()
    sam.first_step()
    value = criterion(model, batch)
    value.backward()
    sam.restore()
    return value.detach()


generator = torch.Generator().manual_seed(5)
batches = [
    {
        "tokens": torch.randint(VOCAB, (12, 5), generator=generator),
        "labels": torch.randint(CLASSES, (12,), generator=generator),
    }
    for _ in range(3)
]
arguments = TextClassifier, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
options["optimizer"] = create_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
