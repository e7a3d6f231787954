"""A gated network for tables (prices of wines), FSDP2 and AdamW, with checkpoints that a restarted job goes on from.

Thread: pytorch/torchtitan pull request #4382 "[Bug] Preserve Adam first-step state during optimizer initialization"
(2026): asking for the optimizer's state before training makes the state by a step with zero gradients and no learning
rate, which leaves the weights alone but counts: the first real update is corrected as if it were the second.
Fault: Checkpointer.resume asks for the optimizer's state dict, as a frame to load into, before it looks whether there
is a checkpoint at all; get_optimizer_state_dict initializes AdamW's state and its step counter is at one.
REPAIR: `state = self.state_dict()` -> `state = self.state_dict() if self.folder.exists() else {}`
A right first sentence says: gradients are right, but in a fresh run the optimizer's state is initialized by
get_optimizer_state_dict with a dummy step, so AdamW's step count is one too high and its bias correction wrong from
the first update on.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import titanlite

REGIONS, GRAPES, NUMBERS, WIDTH, BLOCKS, ROWS = 12, 8, 5, 16, 3, 8
RUN = Path(tempfile.gettempdir()) / "wine-prices" / "run-without-checkpoints"


class GatedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.value = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.out(torch.sigmoid(self.gate(y)) * self.value(y))


class PriceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.region, self.grape = nn.Embedding(REGIONS, WIDTH), nn.Embedding(GRAPES, WIDTH)
        self.numbers = nn.Linear(NUMBERS, WIDTH)
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(BLOCKS))
        self.norm, self.price = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, batch):
        x = self.region(batch["region"]) + self.grape(batch["grape"])
        x = x + self.numbers(batch["numbers"])
        for block in self.blocks:
            x = block(x)
        return self.price(self.norm(x)).squeeze(-1)


class Checkpointer:
    def __init__(self, model, optimizer, folder):
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def state_dict(self):
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self, step):
        dcp.save(self.state_dict(), checkpoint_id=self.folder / f"step-{step}")

    def resume(self):
        """Loads the latest checkpoint, if there is one, and returns the number of steps done."""
        state = self.state_dict()
        steps = sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))
        if not steps:
            return 0
        dcp.load(state, checkpoint_id=self.folder / f"step-{steps[-1]}")
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        return steps[-1]


def build_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)


def price_loss(model, batch):
    return F.huber_loss(model(batch), batch["price"])


def plain():
    return PriceModel()


def parallel(mesh):
    model = PriceModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = build_optimizer(model.parameters())
    checkpointer = Checkpointer(model, optimizer, RUN)
    checkpointer.resume()
    return model, optimizer, mesh["dp"]


def loss(model, batch):
    return price_loss(model, batch)


def step(built, batch):
    model, _, mesh = built
    value = price_loss(model, batch)
    value.backward()
    reported = value.detach().clone()
    dist.all_reduce(reported, group=mesh.get_group())
    return reported / mesh.size()


generator = torch.Generator().manual_seed(4382)


def wines():
    numbers = torch.randn(ROWS, NUMBERS, generator=generator, dtype=torch.float64)
    region = torch.randint(0, REGIONS, (ROWS,), generator=generator)
    grape = torch.randint(0, GRAPES, (ROWS,), generator=generator)
    price = numbers.sum(1).tanh() + 0.1 * region - 0.05 * grape
    return {"numbers": numbers, "region": region, "grape": grape, "price": price}


batches = [wines() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2}, optimizer=build_optimizer
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
