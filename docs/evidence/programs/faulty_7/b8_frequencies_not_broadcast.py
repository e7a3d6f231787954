"""Random Fourier features under FSDP2: rank 0's parameters are broadcast, its buffers are not.

Thread: of the kind "buffers are not synchronized from rank 0" (FSDP's sync_module_states, torchtune and LlamaFactory
loading on rank 0; pytorch/pytorch#108331 is about the broadcast itself), 2022 to 2025.
Wrong: each rank seeds with its own number before it builds the model, then the parameters are broadcast. The random
frequencies of the time embedding are a buffer, so rank 1 keeps its own, in all steps.
PLACE: time.frequencies (buffer), from the start, on rank 1
KIND: buffer not broadcast from rank 0: ranks have different values
REPAIR: `for tensor in model.parameters():` -> `for tensor in [*model.parameters(), *model.buffers()]:`
EXPECT: the buffer time.frequencies differs on rank 1 (right on rank 0) from the start: it is not broadcast, or seeded,
the same on all ranks; all parameters agree. Broadcast buffers too, or draw them with one seed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import titanlite

DIM = 8


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(DIM // 2))

    def forward(self, t):
        angle = t[:, None] * self.frequencies
        return torch.cat([angle.sin(), angle.cos()], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x, t):
        return x + self.down(torch.relu(self.up(x + self.shift(t))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = Fourier()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, t):
        t = self.time(t)
        for block in self.blocks:
            x = block(x, t)
        return self.out(x)


def loss(model, batch):
    t = batch["t"][:, None]
    noisy = (1 - t) * batch["x"] + t * batch["noise"]
    return mse_loss(model(noisy, batch["t"]), batch["noise"] - batch["x"])


def parallel(mesh):
    torch.manual_seed(mesh.get_local_rank("dp"))
    model = Denoiser()
    with torch.no_grad():
        for tensor in model.parameters():
            dist.broadcast(tensor, src=0, group=mesh.get_group("dp"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


generator = torch.Generator().manual_seed(6)
batches = [
    {
        "x": torch.randn(8, DIM, generator=generator),
        "noise": torch.randn(8, DIM, generator=generator),
        "t": torch.rand(8, generator=generator),
    }
    for _ in range(3)
]
arguments = Denoiser, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
