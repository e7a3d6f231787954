"""FSDP with a mixed precision policy for buffers: the inverse frequencies of the rotary embedding are rounded.

Thread: https://github.com/facebookresearch/fairseq2/pull/480 "Revise non-persistent buffer handling" ("turns off
FSDP mixed precision for buffers", rotary frequencies), 2024-04-26.
Wrong: buffer_dtype=torch.bfloat16 casts inv_freq in the first forward pass and leaves it so. The angles are products
of positions and rounded frequencies. Parameters and gradients keep their precision.
EXPECT: the buffer inv_freq of attn.rotary (or the output of attn.rotary) is the first that differs, on every rank
alike: it is rounded to bfloat16 by FSDP's mixed precision. Loss and gradients differ because of it, by a small part.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS, LENGTH = 13, 16, 2, 40


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = base ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, x):
        positions = torch.arange(x.shape[-2], dtype=x.dtype)
        angles = torch.outer(positions, self.inv_freq.to(x.dtype))
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(DIM // HEADS), nn.LayerNorm(DIM // HEADS)
        self.rotary = Rotary(DIM // HEADS)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(b, s, DIM))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.attn, self.head = Attention(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attn(self.norm(x)))


def loss(model, batch):
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    return FullyShardedDataParallel(
        Decoder(),
        process_group=mesh.get_group("dp"),
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


generator = torch.Generator().manual_seed(480)
batches = [
    {n: torch.randint(VOCAB, (4, LENGTH), generator=generator) for n in ("tokens", "targets")}
    for _ in range(3)
]
arguments = Decoder, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
