"""A multi-task model under a hand-written DDP: parameters that no rank used get a gradient of zeros.

Thread: https://github.com/pytorch/pytorch/issues/28294 "DDP should set grad to None for (globally) unused params"
("could trigger convergence problems for optimizers with weight decay and momentum"), 2019-10-18.
Wrong: a head that took no part in the step has no gradient in one process, and AdamW skips it. On the ranks its
gradient is zero, so AdamW decays it and moves it by its old momentum.
EXPECT: the weights of the head that is unused in a step differ (heads.1 from step 1 on): the ranks have a gradient
of zeros where the plain model has none, so the optimizer updates it (weight decay, momentum, its step count). Loss
and the other gradients of step 1 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, TASKS = 12, 2


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(DIM, 3) for _ in range(TASKS))

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


class Reducer(nn.Module):
    def __init__(self, module, group):
        super().__init__()
        self.module, self.group = module, group
        for p in module.parameters():
            dist.broadcast(p.data, dist.get_global_rank(group, 0), group=group)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finalize_backward(self):
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        bucket = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(bucket, group=self.group)
        bucket /= self.group.size()
        for p, chunk in zip(parameters, bucket.split([p.numel() for p in parameters])):
            p.grad.copy_(chunk.view_as(p))


def loss(model, batch):
    return mse_loss(model(batch["x"], int(batch["task"][0])), batch["y"])


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def parallel(mesh):
    return Reducer(MultiTask(), mesh.get_group("dp"))


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    model.finalize_backward()
    return value.detach()


def name_in_one_process(name):
    return name.removeprefix("module.")


generator = torch.Generator().manual_seed(28294)
batches = [
    {
        "x": torch.randn(8, 6, generator=generator),
        "y": torch.randn(8, 3, generator=generator),
        "task": torch.full((8,), i % TASKS),
    }
    for i in range(4)
]
arguments = MultiTask, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
options.update(rename=name_in_one_process, optimizer=make_optimizer)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
