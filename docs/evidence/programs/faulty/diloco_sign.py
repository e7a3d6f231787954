"""DiLoCo whose pseudogradient has the wrong sign.

Thread: https://github.com/meta-pytorch/torchft/pull/233 "simplify streaming diloco", which fixes
"the sign of the pseudogradient", 2025-07-14.
Wrong: the pseudogradient is new - old weights instead of old - new. With sync_every=1 and an outer
SGD of lr 1, DiLoCo over SGD would equal plain SGD on the whole batch.
A right diagnosis says: the weights move in the opposite direction: the optimizer's update has the
wrong sign. (The local gradients are not averaged, which is right here.)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite


def inner_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class DiLoCo(torch.optim.Optimizer):
    """Runs an inner optimizer; every `sync_every` steps an outer one on the pseudogradients."""

    def __init__(self, params, sync_every=1):
        super().__init__(params, {})
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.inner = inner_sgd(self.parameters)
        self.outer = torch.optim.SGD(self.parameters, lr=1.0)
        self.backup = [p.detach().clone() for p in self.parameters]
        self.sync_every, self.local_step = sync_every, 0

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.local_step += 1
        if self.local_step % self.sync_every:
            return
        for p, original in zip(self.parameters, self.backup):
            pseudogradient = p - original
            dist.all_reduce(pseudogradient)
            p.copy_(original)
            p.grad = pseudogradient / dist.get_world_size()
        self.outer.step()
        for p, original in zip(self.parameters, self.backup):
            original.copy_(p)


def build():
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20))


def build_diloco():
    model = build()
    return model, DiLoCo(model.parameters())


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(5)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            build,
            build_diloco,
            batches=batches,
            loss=loss,
            ranks={"dp": 2},
            split="dp",
            step=step,
            optimizer=inner_sgd,
        )
    )
