"""A diffusion transformer trained by flow matching, with a moving average of its weights as a teacher, on a 2D mesh of DTensors.

Might be accused because: each rank updates only its own shards of the moving average, without any communication; FSDP2's division
of the gradients is switched off; the modulation layers are cut by columns though their outputs are used whole on each rank; the
teacher's root is sharded again after its forward pass, and the average is taken before a step and not after it.
Correct because: the average is elementwise and both networks are cut alike, so shards suffice; the losses are divided by the data
parallel ranks before the backward pass, so their gradients may be summed; the modulations are gathered (Replicate) and DTensor
cuts their gradients again; the average before step n+1 is that after step n, in the plain version too.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import titanlite

CHANNELS, TOKENS, WIDTH, HEADS, ROWS, DECAY = 4, 6, 16, 4, 4, 0.9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def attention(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x, c):
        parts = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        y = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(y)))


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.1)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, t):
        angles = t.unsqueeze(1) * torch.arange(1, WIDTH // 2 + 1)
        c = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.inputs(x) + self.places
        for block in self.blocks:
            x = block(x, c)
        return self.outputs(x)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Trainer(nn.Module):
    """The network and the moving average of its weights, which is the teacher of a second loss."""

    def __init__(self):
        super().__init__()
        self.net = DiT()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def update_average(self):
        for mean, parameter in zip(self.average.parameters(), self.net.parameters()):
            local(mean).lerp_(local(parameter), 1 - DECAY)

    def loss(self, batch):
        clean, noise, t, earlier = batch
        self.update_average()
        velocity = noise - clean
        at = [clean + s[:, None, None] * velocity for s in (t, earlier)]
        predicted = self.net(at[0], t)
        with torch.no_grad():
            target = self.average(at[1], earlier)
        return F.mse_loss(predicted, velocity) + 0.5 * F.mse_loss(predicted, target)


PLAN = {
    "modulation": ColwiseParallel(output_layouts=Replicate()),
    **{name: ColwiseParallel() for name in ("q", "k", "v", "fc1")},
    **{name: RowwiseParallel() for name in ("proj", "fc2")},
}


def plain():
    return Trainer()


def parallel(mesh):
    trainer = Trainer()
    for network in (trainer.net, trainer.average):
        for block in network.blocks:
            parallelize_module(block, mesh["tp"], PLAN)
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(network, mesh=mesh["dp"], reshard_after_forward=True)
    for module in (trainer.net, *trainer.net.blocks):
        module.set_gradient_divide_factor(1.0)
    return trainer, mesh.get_group("dp")


def loss(trainer, batch):
    return trainer.loss(batch)


def step(built, batch):
    trainer, group = built
    value = trainer.loss(batch) / dist.get_world_size(group)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value


generator = torch.Generator().manual_seed(19)


def latents():
    shape = (2, ROWS, TOKENS, CHANNELS)
    clean, noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
    t = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return clean, noise, t, 0.8 * t


batches = [latents() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2, "tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.02),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
