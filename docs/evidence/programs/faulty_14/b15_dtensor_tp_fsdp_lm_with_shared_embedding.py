"""A language model with a shared input and output embedding, under DTensor tensor parallelism and FSDP2.

Thread: NVIDIA-NeMo/RL issue #227 "Tied weights are not respected in fsdp1 and fsp2+tp>1" (2025). Small Qwen and Llama
models, whose output layer shares the embedding's weight, trained wrongly as soon as tensor parallelism was on.
Fault: in parallel, parallelize_module gives `embed` and `head` a DTensor parameter of their own each, which ends the
sharing. Either copy then gets only its own part of the gradient and its own update, and input and output embedding
drift apart.
REPAIR: `mesh["tp"], plan)` -> `mesh["tp"], plan); model.head.weight = model.embed.weight`
A right first sentence says: parallelize_module replaced embed.weight and head.weight by two separate DTensor
parameters and the weights are not tied again afterwards, so each copy gets only its own part of the gradient and they
are updated independently.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import titanlite

VOCAB, WIDTH, HIDDEN, LAYERS = 32, 16, 24, 2


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.mix = nn.Parameter(torch.full((1,), 0.5))
        self.feed_forward = FeedForward()

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.feed_forward(self.norm(x + self.mix * before))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plain():
    return Model()


def parallel(mesh):
    model = Model()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "layers.*.feed_forward.gate": ColwiseParallel(),
        "layers.*.feed_forward.up": ColwiseParallel(),
        "layers.*.feed_forward.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)


def loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def make_batches(count=3, rows=4, length=6):
    generator = torch.Generator().manual_seed(8)
    texts = [torch.randint(0, VOCAB, (rows, length + 1), generator=generator) for _ in range(count)]
    return [
        {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
        for text in texts
    ]


batches = make_batches()
arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, optimizer=optimizer, split="dp", ranks={"dp": 2, "tp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
