"""A mixer over patches of wind farm power, under FSDP2 with gradient accumulation that gathers and reduces once.

Thread: meta-pytorch/torchtune issue #2402 "Does FSDP v2 have the best performance?" (2025): ZeRO-1 by
model.set_requires_gradient_sync(is_last_microbatch) and model.set_reshard_after_backward(is_last_microbatch); the API
is pytorch/pytorch pull request #124319 "[FSDP2] Added set_reshard_after_backward".
Fault: WindowTrainer.__init__ calls set_reshard_after_backward(False) once and for all, also for a window's last micro
batch. The optimizer updates the sharded parameters, but the gathered copies of the first window are never dropped, as
an unshard of an unsharded group does nothing: every later forward pass computes with the starting weights.
REPAIR: `self.model.set_is_last_backward(last)` ->
`self.model.set_is_last_backward(last); self.model.set_reshard_after_backward(last)`
A right first sentence says: from the second step on the forward pass uses stale weights, since no FSDP module
reshards after the last micro batch's backward pass (set_reshard_after_backward(False)) and so never gathers the
updated shards.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

TURBINES, PATCH, PATCHES, WIDTH, HORIZON, ROWS, MICRO_BATCHES = 3, 4, 6, 12, 5, 12, 3


class MixerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.over_time = nn.Sequential(
            nn.Linear(PATCHES, 10), nn.GELU(), nn.Linear(10, PATCHES, bias=False)
        )
        self.over_features = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.over_time(self.norm1(x).transpose(-1, -2)).transpose(-1, -2)
        return x + self.over_features(self.norm2(x))


class PatchMixer(nn.Module):
    """Forecasts the power of every turbine from its last PATCH * PATCHES quarter hours."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(PATCH, WIDTH)
        self.turbine = nn.Embedding(TURBINES, WIDTH)
        self.layers = nn.ModuleList(MixerLayer() for _ in range(2))
        self.norm, self.forecast = nn.LayerNorm(WIDTH), nn.Linear(PATCHES * WIDTH, HORIZON)

    def forward(self, power):
        x = self.patches(power.unflatten(-1, (PATCHES, PATCH)))
        x = x + self.turbine.weight.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.forecast(self.norm(x).flatten(-2))


class WindowTrainer:
    """Gathers the parameters in the first micro batch, reduces the gradients in the last one."""

    def __init__(self, model, mesh):
        self.model, self.mesh = model, mesh
        self.model.set_reshard_after_backward(False)

    def step(self, batch):
        total = torch.zeros(())
        parts = list(zip(batch["past"].chunk(MICRO_BATCHES), batch["future"].chunk(MICRO_BATCHES)))
        for index, (past, future) in enumerate(parts):
            last = index == len(parts) - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            value = F.huber_loss(self.model(past), future) / len(parts)
            value.backward()
            total += value.detach()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total / self.mesh.size()


def plain():
    return PatchMixer()


def parallel(mesh):
    model = PatchMixer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    return model, WindowTrainer(model, mesh["dp"])


def loss(model, batch):
    return F.huber_loss(model(batch["past"]), batch["future"])


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(2402)


def farms():
    steps = PATCH * PATCHES + HORIZON
    drift = torch.randn(ROWS, TURBINES, steps, generator=generator, dtype=torch.float64)
    shared = torch.randn(ROWS, 1, steps, generator=generator, dtype=torch.float64)
    power = 0.3 * (0.5 * drift + shared).cumsum(-1)
    past, future = power[..., :-HORIZON], power[..., -HORIZON:]
    return {"past": past.contiguous(), "future": future.contiguous()}


batches = [farms() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.02),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
