"""A tensor-parallel plan for attention whose view keeps the number of heads and infers their size.

Thread: https://github.com/huggingface/transformers/issues/34789 "Add `Tensor Parallel` support for ALL
models", comment of 2025-01-16 (keep num_heads the same on each device, and let head_dim be -1?).
Wrong: on each rank the projections have half of the features. view(batch, length, num_heads, -1) makes of
them 4 heads of half the size, so every head of the model is cut in two.
A right diagnosis says: the error is inside attn, between the outputs of q_proj, k_proj, v_proj and the
input of o_proj, on both ranks (the view into heads, or the attention over them).
"""

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import titanlite

HIDDEN, HEADS, VOCAB = 16, 4, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def split_heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 32), nn.Linear(HIDDEN, 32)
        self.down_proj = nn.Linear(32, HIDDEN)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attn, self.mlp = Attention(), GatedMlp()

    def forward(self, x):
        x = x + self.attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


COLWISE = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("attn.o_proj", "mlp.down_proj")


def tensor_parallel(mesh):
    plan = {f"layers.*.{name}": ColwiseParallel() for name in COLWISE}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ROWWISE}
    return parallelize_module(CausalLM(), mesh["tp"], plan)


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(34789)
batches = [
    {name: torch.randint(VOCAB, (2, 7), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"tp": 2})
    print(titanlite.compare(CausalLM, tensor_parallel, **options))
