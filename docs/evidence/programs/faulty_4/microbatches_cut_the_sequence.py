"""A model with the sequence first in a pipeline schedule, which cuts dimension 0 into microbatches.

Thread: https://github.com/pytorch/pytorch/pull/148458 "[PP] RFC for fixing microbatch splitting for dim != 0",
2025-03-04.
Wrong: tokens are (sequence, batch). The schedule's microbatches are the two halves of the sequences instead of
two halves of the batch, so no token sees the other half.
EXPECT: the output of layers.0.attention is the first that differs, its input agrees: the microbatches are parts of
the sequence (dimension 0), not of the batch, so attention sees only its own half.
"""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, BATCH = 12, 8, 8, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.dense = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).transpose(0, 1).chunk(3, -1)
        causal = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = (q @ k.mT / DIM**0.5).masked_fill(causal, float("-inf"))
        return self.dense((scores.softmax(-1) @ v).transpose(0, 1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class GPT(nn.Module):
    def __init__(self, stages=(0, 1)):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM) if 0 in stages else None
        self.layers = nn.ModuleDict({str(i): Layer() for i in stages})
        self.output_layer = nn.Linear(DIM, VOCAB) if 1 in stages else None

    def forward(self, x):
        x = self.embedding(x) if self.embedding else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output_layer(x) if self.output_layer else x


def loss_func(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return loss_func(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    whole, index = GPT(), mesh.get_local_rank("pp")
    part = GPT([index])
    part.load_state_dict({n: t for n, t in whole.state_dict().items() if n in part.state_dict()})
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return part, ScheduleGPipe(stage, 2, loss_fn=loss_func), index


def step(built, batch):
    _, schedule, index = built
    losses, inputs = [], [batch["tokens"]] if index == 0 else []
    schedule.step(*inputs, target=batch["labels"], losses=losses)
    return torch.stack(losses).mean() if losses else None


generator = torch.Generator().manual_seed(148458)
batches = [
    {n: torch.randint(VOCAB, (SEQ, BATCH), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
