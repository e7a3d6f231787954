"""A small decoder with DeepSeek's multi-head latent attention under parallelize_module.

Thread: pytorch/torchtitan pull request #1373 "[DSV3] Adding deepseek-v3 model into torchtitan" (2025), comments on the gradient
of k_pe: the rotary key is computed once for all heads and expanded to the heads of each rank; the forward pass is right, but no
rank's gradient of it sees the heads of the other ranks.
Fault: attn.w_kr is replicated and returns a local tensor whose gradient counts as whole on every rank, though each rank has only
that of its own heads. The all-reduce over tp between the rotary key and w_kr is missing in the backward pass.
REPAIR: `"attn.w_kr": Replicated(),` -> `"attn.w_kr": Replicated(output_grad=[dt.Partial()]),`
A right first sentence says: in the backward pass, the gradient of the output of attn.w_kr is only the part of the rank's own
heads (partial over tp) and has to be all-reduced over tp; w_kr and what lies before it get wrong gradients, different on each
rank.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import tensor as dt
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import titanlite

VOCABULARY, WIDTH, LENGTH = 13, 16, 8
HEADS, NOPE, ROPE, VALUE, LATENT = 4, 4, 4, 4, 8


def rotary(x):
    angles = torch.arange(x.size(1))[:, None] / 100.0 ** (torch.arange(ROPE // 2) / (ROPE // 2))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class LatentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.w_dkv = nn.Linear(WIDTH, LATENT, bias=False)
        self.kv_norm = nn.LayerNorm(LATENT)
        self.w_ukv = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.w_kr = nn.Linear(WIDTH, ROPE, bias=False)
        self.wo = nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def forward(self, x):
        q_nope, q_rope = self.wq(x).unflatten(-1, (-1, NOPE + ROPE)).split([NOPE, ROPE], -1)
        kv = self.w_ukv(self.kv_norm(self.w_dkv(x))).unflatten(-1, (-1, NOPE + VALUE))
        k_nope, v = kv.split([NOPE, VALUE], -1)
        k_rope = rotary(self.w_kr(x).unsqueeze(2)).expand(-1, -1, k_nope.size(2), -1)
        q = torch.cat([q_nope, rotary(q_rope)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.ffn = LatentAttention(), FeedForward()

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Replicated(ParallelStyle):
    """Makes the parameters DTensors, as clipping wants, and computes the same on every rank."""

    def __init__(self, output_grad=None):
        super().__init__()
        self.output_grad = output_grad

    def prepare_input(self, module, inputs, mesh):
        return dt.DTensor.from_local(inputs[0], mesh, [dt.Replicate()], run_check=False)

    def prepare_output(self, module, output, mesh):
        output = output.redistribute(placements=[dt.Replicate()])
        return output.to_local(grad_placements=self.output_grad)

    def _apply(self, module, mesh):
        return dt.distribute_module(module, mesh, None, self.prepare_input, self.prepare_output)


def plain():
    return Decoder()


def parallel(mesh):
    model = Decoder()
    plan = {"embed": Replicated(), "norm": Replicated(), "head": Replicated()}
    for i in range(len(model.layers)):
        layer = {
            "attn_norm": Replicated(),
            "attn.wq": ColwiseParallel(),
            "attn.w_dkv": Replicated(),
            "attn.kv_norm": Replicated(),
            "attn.w_ukv": ColwiseParallel(),
            "attn.w_kr": Replicated(),
            "attn.wo": RowwiseParallel(),
            "ffn_norm": Replicated(),
            "ffn.w1": ColwiseParallel(),
            "ffn.w3": ColwiseParallel(),
            "ffn.w2": RowwiseParallel(),
        }
        plan |= {f"layers.{i}.{name}": style for name, style in layer.items()}
    return parallelize_module(model, mesh["tp"], plan)


def loss(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


generator = torch.Generator().manual_seed(1373)
batches = [
    {
        "tokens": torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator),
        "targets": torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator),
    }
    for _ in range(3)
]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
