"""ZeRO-1 as a wrapper: the schedule changes the learning rate of the wrapper, whose inner optimizer has groups of its own.

Thread: facebookresearch/fairscale issue #66 "[feat] Sync OSS.param_groups and the sharded optimizer param_groups" (2020): "Some
frameworks make it possible to alter any attribute here ... We do not currently support this and silently fail", and
microsoft/dp-transformers issue #43 "LR scheduler does not work properly due to AcceleratedOptimizer" (2024).
Fault: in ShardedAdamW.step, the inner optimizer steps without the values of the outer groups, so it keeps the first learning rate.
REPAIR: `self.inner.step()` -> `self.sync_groups() or self.inner.step()`
A right first sentence says: step 1 agrees with its update; from step 2 on, the updates of all weights are too large by the same
factor on all ranks, while loss and gradients of step 2 agree: the learning rate of the optimizer does not follow the schedule, as
ShardedAdamW's inner optimizer keeps the initial one.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, DECAY = 14, 8, 0.1


def halve(done):
    return 0.5**done


def grouped(parameters):
    parameters = list(parameters)
    matrices, rest = ([p for p in parameters if (p.ndim > 1) == x] for x in (True, False))
    return [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]


class ScheduledAdamW(torch.optim.AdamW):
    def __init__(self, parameters):
        super().__init__(grouped(parameters), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self, halve)

    def step(self, closure=None):
        super().step()
        self.schedule.step()


class ShardedAdamW(torch.optim.Optimizer):
    """Each rank updates every n-th parameter and sends it to the others."""

    def __init__(self, parameters, group):
        super().__init__(grouped(parameters), {"lr": 0.01, "weight_decay": DECAY})
        self.group, size = group, dist.get_world_size(group)
        everything = [p for g in self.param_groups for p in g["params"]]
        self.owners = {p: i % size for i, p in enumerate(everything)}
        mine = [self.own(g["params"]) for g in self.param_groups]
        self.inner = torch.optim.AdamW([{"params": params} for params in mine], lr=0.01)
        self.sync_groups()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self, halve)

    def own(self, parameters):
        return [p for p in parameters if self.owners[p] == dist.get_rank(self.group)]

    def sync_groups(self):
        for inner, outer in zip(self.inner.param_groups, self.param_groups):
            inner.update({key: value for key, value in outer.items() if key != "params"})

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for p, owner in self.owners.items():
            dist.broadcast(p, owner, group=self.group)
        self.schedule.step()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = self.norm(x + torch.tanh(self.mix(past)))
        return x + self.down(gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(Model(), process_group=group)
    return model, ShardedAdamW(model.parameters(), group)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


rng = torch.Generator().manual_seed(415)
batches = []
for _ in range(4):
    rows = torch.randint(VOCAB, (6, 6), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")
options["optimizer"] = ScheduledAdamW

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
