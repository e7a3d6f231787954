"""An interleaved 1F1B schedule over chunks that were assigned as for a plain pipeline.

Thread: https://github.com/PaddlePaddle/Paddle/pull/45402 "[dygraph hybrid pp for interleave] Virtual pp stage
layer split" (which layers belong to which stage), 2022-08-25.
Wrong: rank 0 gets layers 0 and 1, rank 1 layers 2 and 3, but the schedule runs the first chunk of both ranks
before the second: the layers run in the order 0, 2, 1, 3.
A right diagnosis says: layers.2 on rank 1 gets the output of layers.0 as its input, not that of layers.1
(the first wrong input or output is that of layers.2): the layers run in the order 0, 2, 1, 3. Starting
weights agree.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss

import titanlite

FEATURES, WIDTH, LAYERS, RANKS = 6, 20, 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.outputs = nn.Linear(WIDTH, FEATURES)

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.outputs(x)


class Chunk(nn.Module):
    def __init__(self, model, layer, first, last):
        super().__init__()
        self.inputs = model.inputs if first else nn.Identity()
        self.layers = nn.ModuleDict({str(layer): model.layers[layer]})
        self.outputs = model.outputs if last else nn.Identity()

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.outputs(x)


def segment_uniform(rank):
    per_rank = LAYERS // RANKS
    return range(rank * per_rank, (rank + 1) * per_rank)


def pipeline_layers(mesh):
    rank, model, chunks, stages = mesh.get_local_rank("pp"), Model(), [], []
    for virtual, layer in enumerate(segment_uniform(rank)):
        index = virtual * RANKS + rank
        chunks.append(Chunk(model, layer, index == 0, index == LAYERS - 1))
        stages.append(
            PipelineStage(
                chunks[-1], index, LAYERS, torch.device("cpu"), group=mesh.get_group("pp")
            )
        )
    return *chunks, ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=mse_loss)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def train_batch(built, batch):
    schedule, losses = built[-1], []
    inputs = (batch["x"],) if torch.distributed.get_rank() == 0 else ()
    schedule.step(*inputs, target=batch["y"], losses=losses)
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(45402)
batches = [
    {name: torch.randn(8, FEATURES, generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=train_batch)
    print(titanlite.compare(Model, pipeline_layers, **options))
