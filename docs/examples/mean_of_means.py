"""DDP averages the ranks' gradients, but the ranks have different numbers of targets."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens):
        return self.head(torch.relu(self.embed(tokens)))


def loss(model, batch):
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def with_ddp(mesh):
    return DistributedDataParallel(Model())


def step(model, batch):
    value = loss(model, batch)  # the mean over this rank's targets
    value.backward()
    return value


def corrected_step(model, batch):
    num_targets = (batch["targets"] != -100).sum()
    total = num_targets.clone()
    dist.all_reduce(total)
    # DDP divides by the number of ranks.
    value = loss(model, batch) * num_targets / total * dist.get_world_size()
    value.backward()
    return value


torch.manual_seed(1)
tokens = torch.randint(12, (4, 8))
targets = tokens.roll(-1, dims=1)
targets[0, 2:] = -100  # the first sequence is short: the rest is padding
batch = {"tokens": tokens, "targets": targets}

step = corrected_step if "--corrected" in sys.argv else step
options = {"loss": loss, "ranks": {"dp": 2}, "split": "dp", "step": step, "threads": True}
print(titanlite.compare(Model, with_ddp, batches=[batch], **options))
