"""An EMA of the weights that is updated in every microbatch instead of once per optimizer step.

Thread: https://github.com/SWivid/F5-TTS/issues/631 "EMA Update independently from `grad_accumulation_steps`",
2024-12-15 ("no intuition here, just a bug").
Wrong: with two microbatches the average decays twice between two optimizer steps. The weights themselves
are not affected.
A right diagnosis says: the EMA's buffers (ema_...) differ from step 2 on, on all ranks, although losses,
gradients and weights agree in every step: they are averaged more often (once per microbatch) than on one
process.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

GRAD_ACCUMULATION_STEPS, DECAY, MELS = 2, 0.6, 8


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 16)
        self.proj, self.mid = nn.Linear(MELS, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, MELS)

    def forward(self, x, t):
        return self.out(torch.tanh(self.mid(torch.tanh(self.proj(x) + self.time(t)))))


class CFM(nn.Module):
    """flow matching, with an exponential moving average of the transformer's weights"""

    def __init__(self):
        super().__init__()
        self.transformer = DiT()
        for name, p in self.transformer.named_parameters():
            self.register_buffer("ema_" + name.replace(".", "_"), p.detach().clone())

    def forward(self, batch):
        t, mel, noise = batch["t"], batch["mel"], batch["noise"]
        x_t = (1 - t) * noise + t * mel
        return mse_loss(self.transformer(x_t, t), mel - noise)

    @torch.no_grad()
    def update_ema(self):
        for name, p in self.transformer.named_parameters():
            self.get_buffer("ema_" + name.replace(".", "_")).lerp_(p, 1 - DECAY)


def loss(model, batch):
    model.update_ema()  # of the weights after the last optimizer step
    return model(batch)


def prepare(mesh):
    return DDP(CFM(), process_group=mesh.get_group("dp"))


def train_step(model, batch):
    parts = {name: value.chunk(GRAD_ACCUMULATION_STEPS) for name, value in batch.items()}
    total = 0
    for i in range(GRAD_ACCUMULATION_STEPS):
        microbatch = {name: chunks[i] for name, chunks in parts.items()}
        model.module.update_ema()
        model.require_backward_grad_sync = i == GRAD_ACCUMULATION_STEPS - 1
        value = model(microbatch) / GRAD_ACCUMULATION_STEPS
        value.backward()
        total += value.detach()
    return total


def draw(generator):
    return {
        "mel": torch.randn(8, MELS, generator=generator),
        "noise": torch.randn(8, MELS, generator=generator),
        "t": torch.rand(8, 1, generator=generator),
    }


generator = torch.Generator().manual_seed(631)
batches = [draw(generator) for _ in range(3)]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=train_step)
    print(titanlite.compare(CFM, prepare, **options))
