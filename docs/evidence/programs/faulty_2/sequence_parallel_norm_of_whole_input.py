"""nanoGPT with SequenceParallel norms in its tensor-parallel plan, whose embedding is not sharded.

Thread: https://github.com/karpathy/build-nanogpt/issues/17 "Implement tensor parallelism", comment of
2024-06-14 (SequenceParallel "should be sharding across the sequence dimension ... but it seems to be
tiling instead").
Wrong: SequenceParallel takes the plain input for the rank's shard of the sequence, but every rank has the
whole sequence (the plan lacks output_layouts=Shard(1) for wte). Attention therefore gathers the
sequence twice, one copy after the other, and rank 1 keeps what it computes for the second copy.
A right diagnosis says: h.ln_1 (or what attention receives from it) has the sequence twice over tp: its
input is not sharded over the sequence as SequenceParallel assumes. The first values that differ are those
of attention on rank 1.
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
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import titanlite

DIM, HEAD_DIM, VOCAB = 16, 4, 20


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q, self.c_k, self.c_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.c_proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (
            c(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for c in (self.c_q, self.c_k, self.c_v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x):
        return self.c_proj(gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.mlp = CausalSelfAttention(), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.h = nn.Embedding(VOCAB, DIM), Block()
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, idx):
        return self.lm_head(self.h(self.wte(idx)))


def apply_tp(mesh):
    gather = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "h.ln_1": SequenceParallel(),
        "h.attn": PrepareModuleInput(**gather),
        "h.attn.c_q": ColwiseParallel(),
        "h.attn.c_k": ColwiseParallel(),
        "h.attn.c_v": ColwiseParallel(),
        "h.attn.c_proj": RowwiseParallel(output_layouts=Shard(1)),
        "h.ln_2": SequenceParallel(),
        "h.mlp": PrepareModuleInput(**gather),
        "h.mlp.c_fc": ColwiseParallel(),
        "h.mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(GPT(), mesh["tp"], plan)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(38)
batches = [
    {name: torch.randint(VOCAB, (2, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(GPT, apply_tp, batches=batches, loss=loss, ranks={"tp": 2}))
