"""ZeRO-1 by hand: the owners were assigned over the parameters sorted by size, the broadcast goes in model order.

Thread: of the kind "parameters stop changing after wrapping the optimizer, ZeRO stage 1 from scratch" (PyTorch forums
and tutorials of sharded optimizers; the greedy partition by size is that of pytorch/pytorch#46750), 2020 to 2024.
Wrong: a rank updates every second parameter of the list sorted by size. After the step every parameter is broadcast,
the i-th in model order from rank i % n. Where both disagree, the sender has not updated the parameter, and its old
values overwrite the update. These parameters never change.
PLACE: the optimizer step (Zero1.step), the parameters whose broadcast comes from a rank that does not own them
KIND: parameters broadcast from a rank that does not own them: the update is overwritten with old weights
REPAIR: `owner = i % self.size` -> `owner = self.owners[i]`
EXPECT: loss and gradients of step 1 agree, the weights after the optimizer step do not: layers.0.weight and
layers.1.bias are not updated at all, on all ranks (they keep their starting values), and all others are right. The step
broadcasts the two from a rank that does not own them. Broadcast from the owner.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 20), nn.Linear(20, 12), nn.Linear(12, 4)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Zero1(torch.optim.AdamW):
    def __init__(self, params, group, **options):
        self.all, self.group = list(params), group
        self.size, rank = dist.get_world_size(group), dist.get_rank(group)
        by_size = sorted(range(len(self.all)), key=lambda i: -self.all[i].numel())
        self.owners = {i: position % self.size for position, i in enumerate(by_size)}
        super().__init__([p for i, p in enumerate(self.all) if self.owners[i] == rank], **options)

    def zero_grad(self, set_to_none=True):
        for p in self.all:
            p.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for i, p in enumerate(self.all):
            owner = i % self.size
            dist.broadcast(p, src=owner, group=self.group)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(Model(), process_group=group)
    return model, Zero1(model.parameters(), group, lr=1e-3)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(10)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 4, generator=generator)}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
