"""A learning-rate schedule that advances once per process.

Thread: https://github.com/huggingface/accelerate/issues/1398 "lr_scheduler step once in code, but in
every process lr_scheduler step 4 times (when using 4 gpus) why?", 2023-05-08; also
https://github.com/huggingface/accelerate/issues/2926 (2024-07-09).
Wrong: the prepared scheduler makes num_processes steps per optimizer step, but its length is counted
in optimizer steps.
A right diagnosis says: gradients and the first update agree; from step 2 on, all updates are smaller by
the same factor: the learning rate is wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import titanlite


class AcceleratedScheduler:
    def __init__(self, scheduler, num_processes, split_batches=False):
        self.scheduler = scheduler
        self.num_processes = 1 if split_batches else num_processes

    def step(self):
        for _ in range(self.num_processes):
            self.scheduler.step()


class ScheduledSGD(torch.optim.SGD):
    """SGD with momentum; every step advances a linear decay to zero."""

    def __init__(self, params, num_processes=1, num_training_steps=12):
        super().__init__(params, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            self, lambda done: max(0.0, 1 - done / num_training_steps)
        )
        self.scheduler = AcceleratedScheduler(schedule, num_processes)

    def step(self, closure=None):
        super().step()
        self.scheduler.step()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 12, 3, padding=1)
        self.head = nn.Linear(12, 6)

    def forward(self, signal):
        return self.head(torch.relu(self.conv(signal)).amax(-1))


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch["signal"]), batch["tags"])


def prepare():
    model = DistributedDataParallel(Tagger())
    return model, ScheduledSGD(model.parameters(), dist.get_world_size())


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(98)
batches = [
    {
        "signal": torch.randn(8, 3, 9, generator=generator),
        "tags": torch.randint(2, (8, 6), generator=generator).float(),
    }
    for _ in range(4)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Tagger, prepare, optimizer=ScheduledSGD, **options))
