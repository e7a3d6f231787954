"""A sleep stage classifier under DDP whose communication hook does nothing; the trainer reduces after backward.

Thread: pytorch/pytorch pull request #42399 "DDP communication hook: skip dividing grads by world_size if hook
registered" (2020), and the RFC #39272 for which it was made: the hook overrides DDP's communication completely, "User
is responsible to divide by the world_size".
What could be accused: noop_hook leaves every rank with the gradients of its own nights, DDP neither sums nor divides,
there is no no_sync around the first of the two passes and the ranks have five and three nights; but each pass divides
by the number of scored epochs on both ranks, what DDP copies back is the sum of the passes, and finish_gradients sums
over the ranks once, in buckets whose works are all started before the first one is waited for.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import titanlite

STAGES, CHANNELS, EPOCHS, SAMPLES, WIDTH = 5, 2, 6, 30, 12
NIGHTS, SHARES, PASSES, UNSCORED = 8, (5, 3), 2, -1
BUCKET = 900


class EpochEncoder(nn.Module):
    """From the 30 seconds of an epoch to a vector."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(CHANNELS, 8, 7, stride=3), nn.Conv1d(8, WIDTH, 3)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(3, WIDTH)

    def forward(self, x):
        x = F.gelu(self.norm1(self.conv1(x)))
        return F.gelu(self.norm2(self.conv2(x))).mean(-1)


class SleepNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = EpochEncoder()
        self.context = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, STAGES)

    def forward(self, signal):
        x = self.encoder(signal.flatten(0, 1)).unflatten(0, signal.shape[:2])
        return self.head(self.context(x)[0])


def loss_sum(model, signal, stages):
    logits = model(signal).flatten(0, 1)
    return F.cross_entropy(logits, stages.flatten(), ignore_index=UNSCORED, reduction="sum")


class LateAverage:
    """Owns the communication that DDP has been told not to do."""

    def __init__(self, model, group):
        self.model, self.group = model, group
        model.register_comm_hook(None, noop_hook)

    def buckets(self):
        bucket, size = [], 0
        for parameter in reversed(list(self.model.parameters())):
            bucket.append(parameter.grad)
            size += parameter.numel()
            if size >= BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def finish_gradients(self):
        pending = []
        for bucket in self.buckets():
            flat = _flatten_dense_tensors(bucket)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            pending.append((bucket, flat, work))
        for bucket, flat, work in pending:
            work.wait()
            for grad, reduced in zip(bucket, _unflatten_dense_tensors(flat, bucket)):
                grad.copy_(reduced)


def plain():
    return SleepNet()


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(SleepNet(), process_group=group)
    return model, LateAverage(model, group)


def split(batch, mesh):
    rank = mesh.get_local_rank("dp")
    return {name: tensor.split(SHARES)[rank] for name, tensor in batch.items()}


def loss(model, batch):
    scored = (batch["stages"] != UNSCORED).sum()
    return loss_sum(model, batch["signal"], batch["stages"]) / scored


def step(built, batch):
    model, average = built
    scored = (batch["stages"] != UNSCORED).sum()
    dist.all_reduce(scored, group=average.group)
    value = 0.0
    for signal, stages in zip(batch["signal"].chunk(PASSES), batch["stages"].chunk(PASSES)):
        own = loss_sum(model, signal, stages) / scored
        own.backward()
        value = value + own.detach()
    average.finish_gradients()
    return value


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


generator = torch.Generator().manual_seed(42399)


def nights():
    stages = torch.randint(0, STAGES, (NIGHTS, EPOCHS), generator=generator)
    signal = torch.randn(NIGHTS, EPOCHS, CHANNELS, SAMPLES, generator=generator)
    signal = signal + (0.3 * torch.arange(SAMPLES) * (1 + stages[..., None, None])).sin()
    unscored = torch.rand(NIGHTS, EPOCHS, generator=generator) < 0.2
    return {"signal": signal, "stages": stages.masked_fill(unscored, UNSCORED)}


batches = [nights() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 2},
    clip=clip,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=4e-3, weight_decay=0.02),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
