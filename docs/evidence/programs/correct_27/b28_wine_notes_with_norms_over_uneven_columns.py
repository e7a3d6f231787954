"""Tags tasting notes with gated layers on three tensor-parallel ranks; neither the vocabulary nor the hidden width
divides by three, and a norm runs over the hidden columns while they're spread over the ranks as a DTensor.

Thread: pytorch/pytorch pull request #163241 "[DTensor] Fix DTensor.mean with uneven sharding" (2025): means of local
means are weighted wrongly if the shards have different sizes.
Correct: the norm of 10 columns in shards of 4, 4 and 2 takes DTensor's sum, a partial one that is completed, and
divides by the number of all columns, so no shard is weighted by its size. use_local_output=False keeps the uneven
width known from the first layers to the last; nothing is rebuilt from a local tensor. The embedding has rows of 5, 5
and 3; its partial sum is completed before the residual stream. The norm's gains and biases are cut like the columns
and have the gradients of their own; the ranks read the same notes, so nothing else is to be reduced.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import titanlite

WORDS, TAGS, WIDTH, HIDDEN, LENGTH, ROWS = 13, 7, 8, 10, 6, 4


class HiddenNorm(nn.Module):
    """RMS norm and a centring over the hidden columns."""

    def __init__(self):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x):
        x = x - x.sum(-1, keepdim=True) / HIDDEN
        scale = (x.square().sum(-1, keepdim=True) / HIDDEN + 1e-5).rsqrt()
        return x * scale * self.gain + self.bias


class GatedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), HiddenNorm()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(self.inner(F.silu(self.gate(h)) * self.up(h)))


class NoteTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, TAGS)
        self.layers = nn.ModuleList(GatedLayer() for _ in range(3))

    def forward(self, notes):
        x = self.words(notes)
        x = x + 0.5 * x.cumsum(1).roll(1, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.tanh(x).mean(1))


class ColumnVectors(ParallelStyle):
    """Cuts the vectors of a module along the columns that they belong to."""

    def _apply(self, module, device_mesh):
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(cut))
        return module


def plain():
    return NoteTagger()


def parallel(mesh):
    columns = dict(output_layouts=Shard(-1), use_local_output=False)
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "layers.*.gate": ColwiseParallel(**columns),
        "layers.*.up": ColwiseParallel(**columns),
        "layers.*.inner": ColumnVectors(),
        "layers.*.down": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(NoteTagger(), mesh["tp"], plan)


def loss(model, batch):
    return F.multilabel_soft_margin_loss(model(batch["notes"]), batch["tags"])


generator = torch.Generator().manual_seed(163241)


def tasting():
    notes = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    tags = torch.stack([(notes % TAGS == tag).any(1) for tag in range(TAGS)], 1)
    return {"notes": notes, "tags": tags.double()}


batches = [tasting() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, foreach=False),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
