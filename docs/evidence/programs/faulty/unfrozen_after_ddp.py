"""A backbone that is unfrozen after DDP has wrapped the model.

Thread: https://github.com/Lightning-AI/pytorch-lightning/issues/20340 "DDP doesn't work with
pl.callbacks.BackboneFinetuning", comment of 2024-10-17.
Wrong: DDP registers the parameters that require gradients when it is built. The backbone gets
gradients later, but they are never all-reduced.
A right diagnosis says: the gradients of backbone.* are never averaged over dp: each rank has those of
its own part of the batch. Those of the head agree.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class FineTuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 8, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.backbone(x).mean(-1))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def build():
    model = FineTuned()
    model.backbone.requires_grad_(False)
    wrapped = DDP(model)
    wrapped.module.backbone.requires_grad_(True)  # unfreeze_at_epoch = 0
    return wrapped


generator = torch.Generator().manual_seed(7)
batches = [
    {
        "x": torch.randn(6, 1, 12, generator=generator),
        "y": torch.randint(5, (6,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(FineTuned, build, **options))
