"""An encoder-decoder that learns to write a sequence of digits backwards."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import titanlite
from titanlite.parallelize import ParallelPlan

START, VOCAB_SIZE, LENGTH = 10, 11, 16


@dataclass(frozen=True)
class Sizes:
    dim: int = 64
    num_layers: int = 4  # the first half encodes
    num_heads: int = 4


class Seq2Seq(nn.Module):
    """Source tokens and shifted targets, [B, T] each, to logits [B, T, VOCAB_SIZE]."""

    def __init__(self, sizes):
        super().__init__()
        tables = {"token": VOCAB_SIZE, "position": LENGTH}
        self.embed = nn.ModuleDict({k: nn.Embedding(n, sizes.dim) for k, n in tables.items()})
        layers = {str(i): i >= sizes.num_layers // 2 for i in range(sizes.num_layers)}
        self.blocks = nn.ModuleDict({i: Block(sizes, decodes) for i, decodes in layers.items()})
        self.head = nn.Linear(sizes.dim, VOCAB_SIZE, bias=False)

    def forward(self, source, written=None, *, shifted=None, positions=None):
        # A later stage of a pipeline gets both sides, [B, T, E] each, from the stage before it.
        if self.embed is not None:
            places = self.embed["position"](positions)
            source, written = (self.embed["token"](x) + places for x in (source, shifted))
        for block in self.blocks.values():
            source, written = block(source, written)
        return (source, written) if self.head is None else self.head(written)


class Block(nn.Module):
    """An encoder layer changes the source; a decoder layer reads it and changes the other side."""

    def __init__(self, sizes, decodes):
        super().__init__()
        dim, self.decodes = sizes.dim, decodes
        self.attention = Attention()
        self.own, self.cross = Heads(sizes), Heads(sizes) if decodes else None
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 + decodes))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, source, written):
        x = written if self.decodes else source
        y = self.norms[0](x)
        x = x + self.own(y, y, self.attention, is_causal=self.decodes)
        if self.decodes:
            x = x + self.cross(self.norms[2](x), source, self.attention, is_causal=False)
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return (source, x) if self.decodes else (x, written)


class Heads(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.head_dim = sizes.dim // sizes.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(sizes.dim, sizes.dim) for _ in range(4))

    def forward(self, x, source, attention, *, is_causal):
        found = self.q(x), self.k(source), self.v(source)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in found)
        return self.o(attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2))


class Attention(nn.Module):  # a module of its own, which context parallelism replaces
    def forward(self, q, k, v, *, is_causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class Backwards:
    def __init__(self, *, split, seed, seq_len, **_):
        self.num_samples = 256 if split == "validation" else None
        self.first, self.seq_len = (-256 if self.num_samples else seed << 32), seq_len

    def sample(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        tokens = torch.randint(10, (self.seq_len,), generator=generator)
        shifted = torch.cat([torch.tensor([START]), tokens.flip(0)[:-1]])
        return {"tokens": tokens, "targets": tokens.flip(0), "shifted": shifted}


columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("*.q", "*.k", "*.v", "up")}
rows = {f"blocks.*.{name}": RowwiseParallel() for name in ("*.o", "down")}
sides = {"embeddings": ("embed",), "head": ("head",), "attention": "attention"}
PLAN = ParallelPlan({**columns, **rows}, blocks="blocks", **sides, sequence_dim=None)
titanlite.register_model("seq2seq", Seq2Seq, Sizes, plan=PLAN)
titanlite.register_dataset("backwards", Backwards, fields={"targets": 0, "shifted": 0})
