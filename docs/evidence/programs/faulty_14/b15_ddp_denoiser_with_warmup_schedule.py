"""A denoising network trained with DDP and a learning rate that warms up and then falls to zero.

Thread: huggingface/diffusers issue #3954 "Wrong learning rate scheduler training step count for examples with
multi-gpu." (2023). A scheduler prepared by accelerate steps once per process at each optimizer step, but the examples
gave it the number of optimizer steps, so the learning rate had reached its end long before the training.
Fault: PreparedScheduler.step advances the schedule by the number of processes, while build_optimizer makes the
schedule with warm-up and length in optimizer steps. With two ranks, the learning rate is right for the first step
only, then runs through the schedule at twice the speed.
REPAIR: `warmup_then_linear(WARMUP, STEPS)` -> `warmup_then_linear(WARMUP * processes(), STEPS * processes())`
A right first sentence says: The learning rate schedule advances world_size steps at each optimizer step
(PreparedScheduler.step), but its warm-up and total length in build_optimizer are not multiplied by the number of
processes, so the learning rate is wrong from the second step on.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

WIDTH, TIMES, STEPS, WARMUP = 12, 50, 8, 2


def processes():
    return dist.get_world_size() if dist.is_initialized() else 1


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(3, WIDTH)
        self.shift = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(
            nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, time):
        return x + self.layers(self.norm(x) + self.shift(time))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.times = nn.Embedding(TIMES, WIDTH)
        self.inlet = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(2))
        self.outlet = nn.Linear(WIDTH, 6)

    def forward(self, noisy, time):
        x, time = self.inlet(noisy), self.times(time)
        for block in self.blocks:
            x = block(x, time)
        return self.outlet(x)


def warmup_then_linear(warmup, total):
    def factor(step):
        if step < warmup:
            return step / warmup
        return max(0.0, (total - step) / max(1, total - warmup))

    return factor


class PreparedScheduler:
    """Counts samples rather than steps: every process takes a batch of its own at each step."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.num_processes = processes()

    def step(self):
        for _ in range(self.num_processes):
            self.scheduler.step()


def build_optimizer(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, betas=(0.9, 0.99), weight_decay=1e-2)
    schedule = warmup_then_linear(WARMUP, STEPS)
    scheduler = PreparedScheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, schedule))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def plain():
    return Denoiser()


def parallel(mesh):
    return DistributedDataParallel(Denoiser(), process_group=mesh.get_group("dp"))


def loss(model, batch):
    clean, noise, time = batch
    strength = (1 - time / TIMES).unsqueeze(-1)
    noisy = strength.sqrt() * clean + (1 - strength).sqrt() * noise
    return F.mse_loss(model(noisy, time), noise)


def make_batches(count=4, rows=8):
    generator = torch.Generator().manual_seed(21)

    def draw():
        return torch.randn(rows, 6, generator=generator, dtype=torch.float64)

    return [
        (draw(), draw(), torch.randint(0, TIMES, (rows,), generator=generator))
        for _ in range(count)
    ]


batches = make_batches()
arguments = plain, parallel
options = dict(batches=batches, loss=loss, optimizer=build_optimizer, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
