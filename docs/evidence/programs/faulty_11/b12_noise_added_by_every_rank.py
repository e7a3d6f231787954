"""Training with private gradients: noise is added to the sum of the gradients, which is reduced by the optimizer.

Thread: of the kind meta-pytorch/opacus pull request #196 "DDP support for faster distributed training" (2021), with "Only one GPU
adds noise", and issue #191 "Opacus DDP integration" (2021).
Fault: in PrivateSGD.step, every rank adds the noise of the step to its own sum before the sums of the ranks are added up, so the
noise is in the result once per rank.
REPAIR: `grad = p.grad * self.rows + noise` -> `grad = p.grad * self.rows + (self.rank == 0) * noise`
A right first sentence says: the loss and the gradients of step 1 agree up to their average over the ranks; all weights are wrong
after step 1, on all ranks alike: in PrivateSGD.step (the optimizer), each rank adds the noise before the all-reduce, so the
update has it as often as there are ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

FEATURES, HIDDEN, CLASSES, ROWS, SIGMA = 6, 9, 3, 8, 0.3


class PrivateSGD(torch.optim.Optimizer):
    """SGD with momentum on the mean of the rows' gradients and Gaussian noise, the same for all who know the seed."""

    def __init__(self, params, lr=0.1, group=None, distributed=False):
        super().__init__(params, {"lr": lr, "momentum": 0.9})
        self.group, self.distributed = group, distributed
        self.rank = dist.get_rank(group) if distributed else 0
        self.rows = ROWS // (dist.get_world_size(group) if distributed else 1)
        self.generator = torch.Generator().manual_seed(2021)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                noise = SIGMA * torch.randn(p.shape, generator=self.generator)
                grad = p.grad * self.rows + noise
                if self.distributed:
                    dist.all_reduce(grad, group=self.group)
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(grad / ROWS)
                p -= group["lr"] * state["momentum"]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.middle = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.output = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.input(x))
        return self.output(self.norm(x + torch.tanh(self.middle(x))))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parallel(mesh):
    model, group = Classifier(), mesh.get_group("dp")
    for p in model.parameters():
        dist.broadcast(p.data, 0, group=group)
    return model, PrivateSGD(model.parameters(), group=group, distributed=True)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


rng = torch.Generator().manual_seed(414)
batches = [
    {
        "x": torch.randn(ROWS, FEATURES, generator=rng),
        "y": torch.randint(CLASSES, (ROWS,), generator=rng),
    }
    for _ in range(3)
]
arguments = Classifier, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")
options["optimizer"] = PrivateSGD

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
