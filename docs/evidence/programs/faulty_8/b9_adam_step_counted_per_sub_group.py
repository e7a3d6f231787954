"""ZeRO-1 with an Adam of its own that updates sub-groups one after the other: each of them advances the step count.

Thread: deepspeedai/DeepSpeed pull request #1823 "fix step in adam" (2022): ZeRO steps on each sub-group independently,
"but adam implementation uses a single step for the whole param group".
Wrong: the step count, which the bias corrections use, belongs to the parameter group. A rank that owns two sub-groups
advances it twice in each optimizer step.
PLACE: the optimizer step (SubGroupAdamW.update), from step 1 on; which parameters: those of a rank's second sub-group in
step 1, and of all sub-groups from step 2 on
KIND: Adam's step count (bias correction) advanced once per sub-group instead of once per step
REPAIR: `group["step"] += 1` -> `group["step"] += sub_group == 0`
EXPECT: loss and gradients of step 1 agree, the weights after the optimizer step do not: those of layers.1 and layers.3
(the second sub-group of each rank) get the update of Adam's step 2 (bias correction with step count 2, not 1), and those
of layers.0 and layers.2 are right in step 1 and wrong from step 2 on. Count the step once for all sub-groups.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, HIDDEN, CLASSES = 6, 16, 5


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [FEATURES, HIDDEN, HIDDEN, HIDDEN, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class SubGroupAdamW(torch.optim.Optimizer):
    """AdamW of the sub-groups that this rank owns; the others' weights come from their owners."""

    def __init__(self, sub_groups, group, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.sub_groups, self.ranks = sub_groups, group
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=0)
        super().__init__([p for params in sub_groups for p in params], defaults)

    def owned(self):
        share = len(self.sub_groups) // dist.get_world_size(self.ranks)
        first = dist.get_rank(self.ranks) * share
        return self.sub_groups[first : first + share]

    def update(self, sub_group, params):
        group = self.param_groups[0]
        group["step"] += 1
        (beta1, beta2), step = group["betas"], group["step"]
        for p in params:
            state = self.state[p]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
            p.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1**step))

    @torch.no_grad()
    def step(self, closure=None):
        for sub_group, params in enumerate(self.owned()):
            self.update(sub_group, params)
        share = len(self.sub_groups) // dist.get_world_size(self.ranks)
        for i, params in enumerate(self.sub_groups):
            for p in params:
                dist.broadcast(p.data, src=i // share, group=self.ranks)


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(Classifier(), process_group=group)
    return model, SubGroupAdamW([list(layer.parameters()) for layer in model.module.layers], group)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(115)


def draw():
    x = torch.randn(12, FEATURES, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (12,), generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Classifier, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
