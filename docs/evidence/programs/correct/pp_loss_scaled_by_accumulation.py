"""A pipeline with gradient accumulation that scales the loss instead of the gradients.

Thread: https://github.com/pytorch/torchtitan/pull/1732 "fix: pp grad accumulation is broken",
2025-09-22.
Right: scale_grads=False, and the loss is divided by microbatches x accumulation steps.
Must not be accused: gradients summed over the schedule's calls or microbatches; the sum of the
returned losses.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
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


def rescale_accumulated_loss(unwrapped_loss_fn, steps):
    return lambda *args: unwrapped_loss_fn(*args) / steps


def cross_entropy_loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_loss(model, batch):
    return cross_entropy_loss(model(batch["x"]), batch["y"])


def build(mesh):
    model, index = Model(), mesh.get_local_rank("pp")
    if index == 0:
        model.head = None
    else:
        model.embed = None
    del model.layers[str(1 - index)]
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    loss_fn = rescale_accumulated_loss(cross_entropy_loss, MICROBATCHES * ACCUMULATION)
    return model, Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)


def train_step(built, batch):
    _, schedule = built
    total = 0
    for x, y in zip(batch["x"].chunk(ACCUMULATION), batch["y"].chunk(ACCUMULATION)):
        losses = []
        if dist.get_rank() == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            total = total + torch.stack(losses).sum()
    return total if dist.get_rank() else None


generator = torch.Generator().manual_seed(13)
batches = [
    {name: torch.randint(20, (16, 5), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"pp": 2}, step=train_step)
    print(titanlite.compare(Model, build, **options))
