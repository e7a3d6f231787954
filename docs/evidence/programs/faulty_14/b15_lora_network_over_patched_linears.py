"""LoRA training of a frozen denoiser: a network of adapters, wrapped in DDP, replaces the forward methods of its linear layers.

Thread: kohya-ss/sd-scripts pull request #989 "Fix gradients synchronization" (2023): with adapters that replace forward methods,
the DDP wrapped network is never called, and its gradients weren't synchronized over the GPUs.
Fault: Trainee.forward runs the patched denoiser, which calls the adapters directly; DDP's own forward never runs, so its reducer
is never armed and step leaves each rank with the gradients of its own samples; the ranks' adapters drift apart.
REPAIR: `value.backward()` -> `value.backward(); [reduce_mean(p.grad) for p in model.network.parameters()]`
A right first sentence says: the gradients of all LoRA weights are never averaged over the data parallel ranks, because the
forward pass goes through the patched denoiser and not through the DDP wrapper around the adapter network.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

WIDTH, RANK, ALPHA = 16, 4, 2.0


class ResBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_hidden, self.to_time, self.to_out = (
            nn.Linear(WIDTH, 32),
            nn.Linear(8, 32),
            nn.Linear(32, WIDTH),
        )

    def forward(self, x, time):
        return x + self.to_out(F.silu(self.to_hidden(self.norm(x)) + self.to_time(time)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.blocks = nn.ModuleList(ResBlock() for _ in range(2))

    def forward(self, x, timestep):
        phases = timestep[:, None] * 10.0 ** -torch.arange(4)
        time = torch.cat([phases.sin(), phases.cos()], dim=-1)
        x = self.conv_in(x)
        for block in self.blocks:
            x = block(x, time)
        return self.conv_out(x)


class LoRAModule(nn.Module):
    def __init__(self, original):
        super().__init__()
        self.lora_down = nn.Linear(original.in_features, RANK, bias=False)
        self.lora_up = nn.Linear(RANK, original.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)
        self.scale = ALPHA / RANK

    def apply_to(self, original):
        self.original_forward = original.forward
        original.forward = self.forward

    def forward(self, x):
        return self.original_forward(x) + self.lora_up(self.lora_down(x)) * self.scale


class LoRANetwork(nn.Module):
    def __init__(self, denoiser):
        super().__init__()
        self.targets = {
            name: m for name, m in denoiser.blocks.named_modules() if isinstance(m, nn.Linear)
        }
        self.loras = nn.ModuleDict(
            {name.replace(".", "_"): LoRAModule(m) for name, m in self.targets.items()}
        )

    def apply_to_targets(self):
        for name, original in self.targets.items():
            self.loras[name.replace(".", "_")].apply_to(original)


class Trainee(nn.Module):
    def __init__(self, denoiser, network):
        super().__init__()
        self.denoiser, self.network = denoiser, network

    def forward(self, x, timestep):
        return self.denoiser(x, timestep)


def build():
    denoiser = Denoiser().requires_grad_(False)
    network = LoRANetwork(denoiser)
    network.apply_to_targets()
    return denoiser, network


def plain():
    return Trainee(*build())


def parallel(mesh):
    denoiser, network = build()
    return Trainee(denoiser, DistributedDataParallel(network))


def loss(model, batch):
    noisy = batch["latents"] + batch["noise"] * batch["timestep"][:, None]
    return F.mse_loss(model(noisy, batch["timestep"]), batch["noise"])


def reduce_mean(tensor):
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    return reduce_mean(value.detach().clone())


generator = torch.Generator().manual_seed(989)
batches = [
    {
        "latents": torch.randn(8, 6, generator=generator, dtype=torch.float64),
        "noise": torch.randn(8, 6, generator=generator, dtype=torch.float64),
        "timestep": torch.rand(8, generator=generator, dtype=torch.float64),
    }
    for _ in range(4)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(
        [p for p in parameters if p.requires_grad], lr=1e-2
    ),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
