"""A skip connection from the first to the last of four stages, passed on by those between.

Thread: https://github.com/pytorch/pytorch/issues/65038 "[pytorch v1.9.0] for torch sync.pipeline in a
single GPU, passing tensor layer by layer is better or using the skip-connection API is better?",
2021-09-15.
Right: the stages between return original_input unchanged, next to their own output; the schedule sends
both, and both gradients back.
Must not be accused: a stage's second output that is its own input, gradients of stage 0 that come by
two ways.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

import titanlite

FEATURES, HIDDEN, STAGES, CHUNKS = 6, 16, 4, 4


class Layer1(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc1 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        original_input = torch.tanh(self.embed(x))
        return torch.tanh(self.fc1(original_input)), original_input


class Layer2(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc2 = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, original_input):
        return x + torch.tanh(self.fc2(self.norm(x))), original_input


class Layer3(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc3, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, FEATURES)

    def forward(self, x, original_input):
        return self.out(torch.tanh(self.fc3(x)) + original_input)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (Layer1(), Layer2(), Layer2(), Layer3())
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})

    def forward(self, x):
        state = (x,)
        for layer in self.layers.values():
            state = layer(*state)
        return state


class Stage(nn.Module):
    def __init__(self, model, index):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): model.layers[str(index)]})

    def forward(self, *state):
        (layer,) = self.layers.values()
        return layer(*state)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def build(mesh):
    index = mesh.get_local_rank("pp")
    module = Stage(Model(), index)
    stage = PipelineStage(module, index, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, ScheduleGPipe(stage, CHUNKS, loss_fn=mse_loss)


def step(built, batch):
    losses = []
    inputs = [batch["x"]] if dist.get_rank() == 0 else []
    built[1].step(*inputs, target=batch["y"], losses=losses)
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(54)
batches = [
    {name: torch.randn(8, FEATURES, generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 4}, step=step)
    print(titanlite.compare(Model, build, **options))
