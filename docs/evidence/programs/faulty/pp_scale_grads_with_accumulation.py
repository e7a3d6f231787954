"""A pipeline schedule with scale_grads=True, called twice for gradient accumulation.

Thread: https://github.com/pytorch/torchtitan/issues/1733 "Gradient accumulation broken in PP",
2025-09-22.
Wrong: the schedule divides all gradients by its number of microbatches at the end of each call, those
of the earlier accumulation steps included.
A right diagnosis says: the contribution of the first accumulation step (the first half of the batch)
counts 1/4 of what it should (4 is the number of microbatches); the second half is right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import titanlite

ACCUMULATION, MICROBATCHES = 2, 4


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
                for i in range(2)
            }
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = x + layer(x)
        return self.head(x) if self.head is not None else x


def mean_loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten()) / ACCUMULATION


def plain_loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def build(mesh):
    model, index = Model(), mesh.get_local_rank("pp")
    if index == 0:
        model.head = None
    else:
        model.embed = None
    del model.layers[str(1 - index)]
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return model, ScheduleGPipe(stage, MICROBATCHES, loss_fn=mean_loss)


def train_step(built, batch):
    _, schedule = built
    total = 0
    for x, y in zip(batch["x"].chunk(ACCUMULATION), batch["y"].chunk(ACCUMULATION)):
        losses = []
        if dist.get_rank() == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            total = total + torch.stack(losses).mean()
    return total if dist.get_rank() else None


generator = torch.Generator().manual_seed(6)
batches = [
    {name: torch.randint(20, (16, 5), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"pp": 2}, step=train_step)
    print(titanlite.compare(Model, build, **options))
