"""LoRA matrices that every GPU draws from its own seed.

Thread: https://github.com/Nerogar/OneTrainer/pull/803 "deterministic LoRA initialization", 2025-04-20.
Wrong: the base model is the same everywhere, but lora_down is drawn with a generator that is seeded
differently on each rank, and nothing broadcasts it. Gradients are averaged.
A right diagnosis says: the starting values of the lora_down matrices differ on rank 1 (they are not
the same on all ranks of dp: not broadcast, or not seeded alike).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

SYSTEM_SEED = 20250420


class LoRAModule(nn.Module):
    def __init__(self, orig_module, rank, generator):
        super().__init__()
        self.orig_module = orig_module.requires_grad_(False)
        out_features, in_features = orig_module.weight.shape
        self.lora_down = nn.Parameter(
            torch.randn(rank, in_features, generator=generator) / in_features
        )
        self.lora_up = nn.Parameter(torch.full((out_features, rank), 0.01))

    def forward(self, x):
        return self.orig_module(x) + x @ self.lora_down.t() @ self.lora_up.t()


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(9, 20), nn.Linear(20, 20), nn.Linear(20, 8)

    def forward(self, noisy, t):
        x = torch.cat([noisy, t[:, None]], 1)
        return self.out(torch.relu(self.mid(torch.relu(self.inp(x)))))


def create_model(device_index=0):
    model = Denoiser()
    generator = torch.Generator().manual_seed(SYSTEM_SEED + device_index)
    for name in ("inp", "mid", "out"):
        setattr(model, name, LoRAModule(getattr(model, name), 2, generator))
    return model


def multi_gpu():
    return create_model(dist.get_rank())


def loss(model, batch):
    a = (1 - batch["t"])[:, None]
    noisy = a * batch["latent"] + (1 - a) * batch["noise"]
    return mse_loss(model(noisy, batch["t"]), batch["noise"])


def train_step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(803)
batches = [
    {
        "latent": torch.randn(8, 8, generator=generator),
        "noise": torch.randn(8, 8, generator=generator),
        "t": torch.rand(8, generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=train_step)
    print(titanlite.compare(create_model, multi_gpu, **options))
