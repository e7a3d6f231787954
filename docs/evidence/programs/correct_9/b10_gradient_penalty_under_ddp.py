"""The critic of a GAN with a gradient penalty under DDP: torch.autograd.grad inside the step, which DDP does not see.

Thread: of the kind pytorch/pytorch issue #63812 "Calling backward with create_graph on the output of a
DistributedDataParallel throws error" (2021) and issue #47562 "Wrong gradients when using DistributedDataParallel and
autograd.grad." (2020).
Correct: the inner gradient is that of a row's score with respect to this row, so it is not to be reduced; the penalty is
a mean over rows like the rest of the loss. Only the outer backward pass reaches the parameters, and DDP averages it. All
parameters take part in the loss, the last bias too.
"""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, HIDDEN, WEIGHT = 6, 12, 3.0


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.score(softplus(self.second(x)))[:, 0]


def loss(model, batch):
    real, fake, share = batch["real"], batch["fake"], batch["share"]
    between = (share * real + (1 - share) * fake).requires_grad_()
    scores = model(torch.cat([real, fake, between]))
    real_scores, fake_scores, between_scores = scores.chunk(3)
    (slope,) = torch.autograd.grad(between_scores.sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return softplus(-real_scores).mean() + softplus(fake_scores).mean() + WEIGHT * penalty


def parallel(mesh):
    return DistributedDataParallel(Critic(), process_group=mesh.get_group("dp"))


generator = torch.Generator().manual_seed(233)


def draw():
    real, fake = torch.randn(2, 8, FEATURES, generator=generator)
    return {"real": real, "fake": fake + 0.5, "share": torch.rand(8, 1, generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Critic, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
