"""FSDP2 with reentrant activation checkpointing behind a frozen embedding: the blocks get no gradients.

Thread: huggingface/transformers issue #21381 "gradient checkpointing disables requires_grad when freezing part of
models" and issue #26221 "Gradient checkpointing should have no functional impact" (2023).
Wrong: the embedding is frozen, so the input of the first checkpointed block does not require a gradient. The reentrant
checkpoint then gives an output without a graph, and so does each block behind it.
PLACE: blocks.* (all their parameters), backward pass, on all ranks
KIND: reentrant checkpoint whose inputs do not require gradients cuts the graph: the blocks get no gradients
REPAIR: `use_reentrant=True` -> `use_reentrant=False`
EXPECT: the forward pass and the loss agree; blocks.* have no gradient (None) on all ranks and are not updated, and norm
and head agree: the blocks are checkpointed (reentrant) with an input that requires no gradient, since embed is frozen.
Use the non-reentrant checkpoint, or let the input require a gradient.
"""

import warnings

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

import titanlite

VOCAB, DIM = 16, 8
warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")


class Mixer(nn.Module):
    """The mean of the tokens so far, gated."""

    def __init__(self):
        super().__init__()
        self.value, self.gate = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x):
        past = self.value(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return past * torch.sigmoid(self.gate(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.mixer = Mixer()
        self.gate, self.up = (
            nn.Linear(DIM, 3 * DIM, bias=False),
            nn.Linear(DIM, 3 * DIM, bias=False),
        )
        self.down = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, checkpointing=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpointing else block(x)
        return self.head(self.norm(x))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Decoder(checkpointing=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


generator = torch.Generator().manual_seed(104)


def draw():
    return torch.randint(VOCAB, (8, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Decoder, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
