"""parallelize_module's SequenceParallel on activations of the form (tokens, rows, features): it cuts the rows.

Thread: of the kind pytorch/pytorch pull request #121295 "[TP] Introduce Sequence Parallel Style" (2024: sequence_dim is 1 by
default).
Correct: the model has the tokens first, as Megatron's does. SequenceParallel and the layouts Shard(1) then cut the rows of
the batch and not the tokens. Norms and residuals are local anyway, and attention gets all of its input gathered, so the
result is the same.
"""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS = 16, 8, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            proj(x).unflatten(-1, (-1, DIM // HEADS)).permute(1, 2, 0, 3)
            for proj in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.permute(2, 0, 1, 3).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens.t())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(0, 1)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def gathered():
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def parallel(mesh):
    model = Model()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.norm1"] = plan[f"blocks.{i}.norm2"] = SequenceParallel()
        plan[f"blocks.{i}.attention"], plan[f"blocks.{i}.mlp"] = gathered(), gathered()
        for name in ("attention.q", "attention.k", "attention.v", "mlp.up"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "mlp.down"):
            plan[f"blocks.{i}.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, mesh["tp"], plan)


generator = torch.Generator().manual_seed(136)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
