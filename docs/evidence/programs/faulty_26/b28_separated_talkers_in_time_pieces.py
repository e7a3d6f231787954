"""Separation of three talkers in long recordings: every rank has a piece of the frames of each recording.

Thread: yuzhou-git/deep-casa issue #2 "Any t-PIT loss calculation included?" (2020): a loss which takes each piece of
a mixture "as an independent element to calculate the loss and permutation" is tPIT, whose talkers swap outputs from
piece to piece; uPIT, which was meant, keeps one permutation for the whole utterance.
Fault: find_best_perm takes the smallest of the permutations' losses over the rank's own frames, so that the ranks
pair the outputs with the talkers in different orders; in one process one order holds for the whole recording.
REPAIR: `return torch.argmin(losses, dim=1)` -> `dist.all_reduce(losses, group=self.group) if self.group else None;
return torch.argmin(losses, dim=1)`
A right first sentence says: PITLoss.find_best_perm chooses the permutation of the talkers from the losses of the
rank's own frames, which aren't summed over the ranks of the sequence (axis time), so ranks train on different
permutations.
"""

from itertools import permutations

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

TALKERS, BINS, FRAMES, WIDTH, ROWS = 3, 10, 24, 16, 4


class SumOverTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class GlobalLayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.group = None

    def moment(self, x):
        total = x.sum(dim=(1, 2), keepdim=True)
        if self.group is not None:
            total = SumOverTime.apply(total, self.group)
        return total / (FRAMES * WIDTH)

    def forward(self, x):
        centred = x - self.moment(x)
        return self.gain * centred * torch.rsqrt(self.moment(centred**2) + 1e-8) + self.bias


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottleneck = nn.Linear(BINS, WIDTH)
        self.norms = nn.ModuleList(GlobalLayerNorm() for _ in range(2))
        self.expand = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.contract = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.masks = nn.Linear(WIDTH, TALKERS * BINS)

    def forward(self, mixture):
        x = self.bottleneck(mixture)
        for norm, expand, contract in zip(self.norms, self.expand, self.contract):
            x = x + contract(F.gelu(expand(norm(x))))
        masks = self.masks(x).unflatten(-1, (TALKERS, BINS)).softmax(dim=2)
        return masks * mixture.unsqueeze(2)


class PITLoss:
    def __init__(self, group=None):
        self.group = group
        self.perms = torch.tensor(list(permutations(range(TALKERS))))

    @staticmethod
    def pairwise(estimates, talkers):
        difference = estimates.unsqueeze(3) - talkers.unsqueeze(2)
        return difference.square().sum(dim=(1, 4)) / (FRAMES * BINS)

    def per_permutation(self, pairwise):
        return pairwise[:, torch.arange(TALKERS), self.perms].mean(-1)

    @torch.no_grad()
    def find_best_perm(self, pairwise):
        losses = self.per_permutation(pairwise)
        return torch.argmin(losses, dim=1)

    def __call__(self, estimates, talkers):
        pairwise = self.pairwise(estimates, talkers)
        best = self.find_best_perm(pairwise)
        return self.per_permutation(pairwise).gather(1, best.unsqueeze(1)).mean()


def plain():
    return Separator()


def parallel(mesh):
    model, group = Separator(), mesh.get_group("time")
    for norm in model.norms:
        norm.group = group
    return model, PITLoss(group)


def loss(model, batch):
    return PITLoss()(model(batch["mixture"]), batch["talkers"])


def step(built, batch):
    model, criterion = built
    share = criterion(model(batch["mixture"]), batch["talkers"])
    share.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=criterion.group)
    total = share.detach().clone()
    dist.all_reduce(total, group=criterion.group)
    return total


generator = torch.Generator().manual_seed(2)


def recordings():
    voices = torch.rand(ROWS, 1, TALKERS, BINS, generator=generator, dtype=torch.float64) ** 2
    speaks = torch.rand(ROWS, FRAMES, TALKERS, 1, generator=generator, dtype=torch.float64)
    talkers = voices * speaks + 0.02
    return {"mixture": talkers.sum(2), "talkers": talkers}


batches = [recordings() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"time": 1},
    ranks={"time": 3},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
