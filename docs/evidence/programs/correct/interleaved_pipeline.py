"""An interleaved pipeline: each rank has two model chunks that are not neighbours.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/513 "[QUESTION] both are right?", 2023-09-22.
Right: with 8 layers, 2 ranks and 2 chunks, rank 0 has layers 0, 1, 4, 5 and rank 1 has 2, 3, 6, 7.
Must not be accused: the order of the layers, or layers "missing" on a rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

import titanlite

LAYERS, CHUNKS = 8, 2


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class GPT(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): Layer(dim) for i in range(LAYERS)})
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def loss_fn(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_loss(model, batch):
    return loss_fn(model(batch["x"]), batch["y"])


def build(mesh):
    rank, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    stages, per_stage = [], LAYERS // (size * CHUNKS)
    for index in range(rank, size * CHUNKS, size):
        torch.manual_seed(0)
        chunk = GPT()
        keep = range(index * per_stage, (index + 1) * per_stage)
        chunk.layers = nn.ModuleDict({str(i): chunk.layers[str(i)] for i in keep})
        if index > 0:
            chunk.embed = None
        if index < size * CHUNKS - 1:
            chunk.head = None
        group = mesh.get_group("pp")
        stages.append(PipelineStage(chunk, index, size * CHUNKS, torch.device("cpu"), group=group))
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_fn)
    return *[stage.submod for stage in stages], schedule


def step(built, batch):
    schedule, losses = built[-1], []
    if dist.get_rank() == 0:
        schedule.step(batch["x"])
        return None
    schedule.step(target=batch["y"], losses=losses)
    return torch.stack(losses).mean()


generator = torch.Generator().manual_seed(12)
batches = [
    {name: torch.randint(20, (8, 5), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"pp": 2}, step=step)
    print(titanlite.compare(GPT, build, **options))
