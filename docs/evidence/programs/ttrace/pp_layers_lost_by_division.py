"""A pipeline whose number of layers is not divisible by its stages loses the last layers.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1304 "[BUG] The problem of splitting transformer
layers when pipeline parallelism cannot be evenly divided.", 2024-11-27.
Wrong: each of 2 stages gets 5 // 2 layers, so layers.4 is on no stage.
A right diagnosis says: layers.4 (its parameters) is on no rank of the parallel model.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LAYERS = 20, 16, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stage(nn.Module):
    def __init__(self, whole, index, stages):
        super().__init__()
        per_stage = LAYERS // stages
        first = index * per_stage
        self.embed = whole.embed if index == 0 else nn.Identity()
        self.layers = nn.ModuleDict(
            {str(i): whole.layers[i] for i in range(first, first + per_stage)}
        )
        self.head = whole.head if index == stages - 1 else nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def mean(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallel(mesh):
    index, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    module = Stage(GPT(), index, stages)
    stage = PipelineStage(module, index, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, ScheduleGPipe(stage, 2, loss_fn=mean)


def step(built, batch):
    losses = []
    inputs = [batch["x"]] if dist.get_rank() == 0 else []
    built[1].step(*inputs, target=batch["y"], losses=losses)
    return torch.stack(losses).mean() if losses else None


def loss(model, batch):
    return mean(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(19)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)
    print(titanlite.compare(GPT, parallel, **options))
