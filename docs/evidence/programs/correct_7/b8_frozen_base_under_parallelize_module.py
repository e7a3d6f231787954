"""LoRA with parallelize_module: the frozen base is sharded, the adapters are not.

Thread: of the kind "LoRA with DTensor tensor parallelism" (torchtune, PEFT with tp_plan, pytorch/pytorch#171523 about
requires_grad), 2024 and 2025.
Correct: base weights are cut by ColwiseParallel and RowwiseParallel and stay frozen. The adapters are plain tensors
on whole activations, equal on all ranks, and need no reduction, although the gradient of x has two parts, one by TP.
"""

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HIDDEN, RANK = 12, 8, 16, 2


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.lora_a, self.lora_b = (
            nn.Linear(DIM, RANK, bias=False),
            nn.Linear(RANK, DIM, bias=False),
        )

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.lora_b(self.lora_a(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)
        for block in self.blocks:
            block.up.requires_grad_(False)
            block.down.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(Model(), mesh["tp"], plan)


generator = torch.Generator().manual_seed(40)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
