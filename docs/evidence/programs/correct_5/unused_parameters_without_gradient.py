"""A hand-written DDP that reduces which parameters were used: none of them gets a gradient if no rank used it.

Thread: https://github.com/pytorch/pytorch/pull/28883 "DDP should not set grad for globally unused params" (for
weight decay and momentum), 2019-10-30.
Right: a head that one rank alone used is averaged with zeros of the others. A head that no rank used has no gradient
on any rank, so AdamW skips it as it does in one process.
Must not be accused: heads that run on some ranks and not on others, gradients that are None, a reduction of zeros.
"""

import torch
import torch.distributed as dist
from torch import nn

import titanlite

DIM, TASKS = 12, 3


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(DIM, 2) for _ in range(TASKS))

    def forward(self, x, task):
        h = self.trunk(x)
        present = task.unique().tolist()
        rows = torch.cat([(task == i).nonzero().squeeze(1) for i in present])
        return torch.cat([self.heads[i](h[task == i]) for i in present])[rows.argsort()]


class Reducer:
    def __init__(self, module, group):
        self.parameters, self.group = list(module.parameters()), group

    def finalize_backward(self):
        used = torch.tensor([p.grad is not None for p in self.parameters]).int()
        dist.all_reduce(used, group=self.group)
        for p, count in zip(self.parameters, used.tolist()):
            if count == 0:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=self.group)
            p.grad /= self.group.size()


def loss(model, batch):
    return (model(batch["x"], batch["task"]) - batch["y"]).square().mean()


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def parallel(mesh):
    model = MultiTask()
    return model, Reducer(model, mesh.get_group("dp"))


def step(built, batch):
    model, reducer = built
    value = loss(model, batch)
    value.backward()
    reducer.finalize_backward()
    return value.detach()


generator = torch.Generator().manual_seed(28883)
tasks = [[0, 0, 0, 1, 0, 1, 0, 0], [0, 2, 2, 2, 0, 0, 0, 0], [1, 1, 2, 2, 0, 0, 1, 0], [2] * 8]
batches = [
    {
        "x": torch.randn(8, 6, generator=generator),
        "y": torch.randn(8, 2, generator=generator),
        "task": torch.tensor(task),
    }
    for task in tasks
]
arguments = MultiTask, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 4}, split="dp", step=step)
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
