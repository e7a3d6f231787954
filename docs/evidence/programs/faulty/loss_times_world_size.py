"""A loss that is multiplied by the world size, under DDP.

Thread: https://github.com/neuralmagic/sparseml/pull/135 "Fix incorrect loss scaling in DDP setup",
2021-04-01.
Wrong: DDP averages gradients; the multiplication makes them world-size times too large.
A right diagnosis says: the loss and all gradients are 2 times too large, and 2 is the degree of dp
(the loss is multiplied by it).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


def build_plain():
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.LayerNorm(24),
        nn.ReLU(),
        nn.Linear(24, 24),
        nn.ReLU(),
        nn.Linear(24, 5),
    )


def plain_loss(model, batch):
    return cross_entropy(model(batch["data"]), batch["target"])


def run_step(model, batch):
    loss = cross_entropy(model(batch["data"]), batch["target"])
    if dist.is_initialized():
        # DDP averages over the processes, so scale the loss
        loss = loss * dist.get_world_size()
    loss.backward()
    return loss


def build():
    return DDP(build_plain())


generator = torch.Generator().manual_seed(4)
batches = [
    {
        "data": torch.randn(6, 12, generator=generator),
        "target": torch.randint(5, (6,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            build_plain,
            build,
            batches=batches,
            loss=plain_loss,
            ranks={"dp": 2},
            split="dp",
            step=run_step,
        )
    )
