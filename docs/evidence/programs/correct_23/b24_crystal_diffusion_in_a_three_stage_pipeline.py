"""A denoiser of small crystals with a weight per noise level, in three stages of torch.distributed.pipelining.

Thread: pytorch/PiPPy pull request #913 "Support multiple arguments in PipelineStage forward" (2023): a stage may take
and return several tensors, and all of them travel between the ranks in both directions.
Correct: the embedding of the noise level is made on the first stage only and handed on, unchanged, by the middle one
as a second output; each stage's gradient for it adds its own share to that of the stages behind, as the tensor is both
used and returned. The weights of the noise levels travel as a further column of the target. The loss of a micro-batch
is a mean over equally many crystals and the weights aren't normalized, so the schedule's division of the gradients by
the number of micro-batches (scale_grads is on by default) gives the gradient of the mean over the batch, and the mean
of the collected losses its value.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import titanlite

ATOMS, WIDTH, LEVELS, ROWS, LAYERS, MICROBATCHES = 6, 16, 10, 8, 6, 4


class ModulatedLayer(nn.Module):
    """Mixes atoms and features; shift, scale and gate come from the embedding of the noise level."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.atoms = nn.Linear(ATOMS, ATOMS)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, level):
        shift, scale, gate = self.modulation(F.silu(level)).unsqueeze(1).chunk(3, dim=-1)
        y = self.norm(x) * (1 + scale) + shift
        y = self.atoms(y.transpose(1, 2)).transpose(1, 2)
        return x + gate * self.mlp(y)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Linear(3, WIDTH)
        self.levels = nn.Sequential(nn.Embedding(LEVELS, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleDict({str(i): ModulatedLayer() for i in range(LAYERS)})
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, level):
        if self.positions is not None:
            x, level = self.positions(x), self.levels(level)
        for layer in self.layers.values():
            x = layer(x, level)
        return (x, level) if self.head is None else self.head(x)


def weighted_error(predicted, target):
    """The squared error of the noise, times the weight of the crystal's noise level."""
    noise, weight = target[..., :3], target[..., 3]
    return ((predicted - noise).square().mean(-1) * weight).mean()


def split_model(model, stage, stages):
    per_stage = LAYERS // stages
    for i in range(LAYERS):
        if i // per_stage != stage:
            del model.layers[str(i)]
    if stage > 0:
        model.positions = model.levels = None
    if stage < stages - 1:
        model.head = None
    return model


class PipelineTrainer:
    def __init__(self, model, mesh):
        self.group = mesh.get_group("pp")
        rank, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
        self.first, self.last = rank == 0, rank == stages - 1
        stage = PipelineStage(model, rank, stages, torch.device("cpu"), group=self.group)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=weighted_error)

    def training_step(self, batch):
        losses, value = [], torch.zeros(())
        arguments = (batch["noisy"], batch["level"]) if self.first else ()
        if self.last:
            self.schedule.step(*arguments, target=batch["target"], losses=losses)
            value = torch.stack(losses).mean().detach()
        else:
            self.schedule.step(*arguments)
        dist.all_reduce(value, group=self.group)
        return value


def plain():
    return Denoiser()


def parallel(mesh):
    model = split_model(Denoiser(), mesh.get_local_rank("pp"), mesh["pp"].size())
    return model, PipelineTrainer(model, mesh)


def loss(model, batch):
    return weighted_error(model(batch["noisy"], batch["level"]), batch["target"])


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(913)
kept = torch.linspace(0.98, 0.1, LEVELS, dtype=torch.float64)


def crystals():
    cell = torch.rand(ROWS, 1, 3, generator=generator, dtype=torch.float64)
    places = torch.rand(ROWS, ATOMS, 3, generator=generator, dtype=torch.float64) + cell
    noise = torch.randn(ROWS, ATOMS, 3, generator=generator, dtype=torch.float64)
    level = torch.randint(0, LEVELS, (ROWS,), generator=generator)
    share = kept[level].view(ROWS, 1, 1)
    weight = (share / (1 - share)).clamp(max=5.0).expand(ROWS, ATOMS, 1)
    return {
        "noisy": share.sqrt() * places + (1 - share).sqrt() * noise,
        "level": level,
        "target": torch.cat([noise, weight], dim=-1),
    }


batches = [crystals() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 3},
    microbatches=MICROBATCHES,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
