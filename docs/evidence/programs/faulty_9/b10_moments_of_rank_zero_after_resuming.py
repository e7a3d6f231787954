"""ZeRO-1 by hand over one flat vector, resumed from a checkpoint after the first step: all ranks load the first rank's moments.

Thread: pytorch/pytorch issue #65650 "Does ZeroRedundancyOptimizer support re-split partition on load_state_dict?" (2021),
and OpenBMB/BMTrain issue #93 on loading optimizer states that each rank saves for itself (2023).
Fault: in restore, every rank takes the first entry of the checkpoint's optimizer states, which is rank 0's; its shape
fits, but it belongs to another part of the weights.
REPAIR: `checkpoint["optimizer"][0]` -> `checkpoint["optimizer"][dist.get_rank(group)]`
Expected: step 1 agrees, and the loss and the gradients of step 2 do too; the weights after the optimizer step of step 2
are wrong in the half of the flat vector that rank 1 owns (the last rows of second.weight, second.bias, third, and last),
and right in the half of rank 0: after resuming, rank 1 has rank 0's Adam moments (exp_avg, exp_avg_sq). Each rank has to
load its own state.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, HIDDEN, OUTPUTS = 5, 12, 3


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.third, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.second(x))
        return self.last(x + torch.tanh(self.third(x)))


class FlatShardedAdamW(torch.optim.Optimizer):
    """Each rank updates its part of the flat vector of all weights, and the ranks gather the parts."""

    def __init__(self, parameters, group):
        super().__init__(list(parameters), {})
        self.group = group
        self.shard = self.own(self.flat([p.detach() for p in self.parameters()])).clone()
        self.adam = torch.optim.AdamW([self.shard], lr=1e-3)

    def parameters(self):
        return self.param_groups[0]["params"]

    def flat(self, tensors):
        vector = torch.cat([t.flatten() for t in tensors])
        return nn.functional.pad(vector, (0, -len(vector) % dist.get_world_size(self.group)))

    def own(self, vector):
        return vector.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]

    @torch.no_grad()
    def step(self, closure=None):
        self.shard.grad = self.own(self.flat([p.grad for p in self.parameters()]))
        self.adam.step()
        parts = [torch.empty_like(self.shard) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, self.shard, group=self.group)
        vector, first = torch.cat(parts), 0
        for p in self.parameters():
            p.copy_(vector[first : first + p.numel()].view_as(p))
            first += p.numel()


class Job:
    """A job that is stopped after its first step and goes on from the checkpoint."""

    def __init__(self):
        self.steps = 0


def save(model, optimizer, group):
    """The model, and the optimizer's state of every rank."""
    states = [{} for _ in range(dist.get_world_size(group))]
    for key in ("step", "exp_avg", "exp_avg_sq"):
        own = optimizer.adam.state[optimizer.shard][key]
        parts = [torch.empty_like(own) for _ in states]
        dist.all_gather(parts, own, group=group)
        for state, part in zip(states, parts):
            state[key] = part
    return {"model": model.state_dict(), "optimizer": states}


def restore(checkpoint, model, optimizer, group):
    model.load_state_dict(checkpoint["model"])
    for key, value in checkpoint["optimizer"][0].items():
        optimizer.adam.state[optimizer.shard][key].copy_(value)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(Regressor(), process_group=group)
    return model, FlatShardedAdamW(model.parameters(), group), Job()


def step(built, batch):
    model, optimizer, job = built
    if job.steps == 1:
        restore(save(model, optimizer, optimizer.group), model, optimizer, optimizer.group)
    job.steps += 1
    value = loss(model, batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(203)


def draw():
    x = torch.randn(8, FEATURES, generator=generator)
    return {"x": x, "y": torch.randn(8, OUTPUTS, generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Regressor, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
