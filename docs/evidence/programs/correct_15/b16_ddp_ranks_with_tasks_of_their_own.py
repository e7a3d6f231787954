"""A speech encoder with two heads under DDP, where each rank trains one task only: two ranks phones, one rank the pitch.

Thread: pytorch/pytorch issue #41101 "DDP should provide an option for not touching grad of locally unused params" (2020): people
run different tasks on different ranks and suspect the gradients that DDP writes to the heads that a rank doesn't use.
Correct: a head that isn't in a rank's graph counts as a gradient of zero, so DDP's average over three ranks holds the sum of the
other ranks' gradients divided by three. The step multiplies a task's mean loss by its weight and by 3 over its number of ranks,
so the average is that of the weighted sum of the two tasks' means. All ranks have all gradients, and all update all heads.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

BANDS, FRAMES, WIDTH, PHONES = 5, 9, 12, 7
TASK_OF_RANK = "phones", "phones", "pitch"
WEIGHTS = {"phones": 1.0, "pitch": 0.3}


class ConvBlock(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.conv = nn.Conv1d(inputs, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(3, WIDTH)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class SpeechModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(ConvBlock(BANDS), ConvBlock(WIDTH), ConvBlock(WIDTH))
        self.phones = nn.Linear(WIDTH, PHONES)
        self.pitch = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, features, task):
        x = self.encoder(features).transpose(1, 2)
        return self.phones(x) if task == "phones" else self.pitch(x).squeeze(-1)


def task_loss(model, task, features, targets):
    output = model(features, task)
    if task == "phones":
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())
    return F.smooth_l1_loss(output, targets)


def plain():
    return SpeechModel()


def parallel(mesh):
    return DistributedDataParallel(SpeechModel(), find_unused_parameters=True)


def loss(model, batch):
    return sum(weight * task_loss(model, task, *batch[task]) for task, weight in WEIGHTS.items())


def split(batch, mesh):
    """The rank's rows of its own task."""
    rank = mesh.get_local_rank("dp")
    task = TASK_OF_RANK[rank]
    peers = [other for other, its in enumerate(TASK_OF_RANK) if its == task]
    return tuple(tensor.chunk(len(peers))[peers.index(rank)] for tensor in batch[task])


def step(model, batch):
    task = TASK_OF_RANK[dist.get_rank()]
    scale = WEIGHTS[task] * len(TASK_OF_RANK) / TASK_OF_RANK.count(task)
    value = scale * task_loss(model, task, *batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(41101)


def utterances(rows):
    return torch.randn(rows, BANDS, FRAMES, generator=generator, dtype=torch.float64)


batches = [
    {
        "phones": (utterances(4), torch.randint(0, PHONES, (4, FRAMES), generator=generator)),
        "pitch": (utterances(3), torch.randn(3, FRAMES, generator=generator, dtype=torch.float64)),
    }
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
