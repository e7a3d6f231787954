"""LoRA on the frozen layers of a small Qwen3-like model under FSDP2, for instructions of unequal lengths.

Thread: huggingface/transformers pull request #48873 "[distributed]: adapt Trainer to work Expert Parallel" (2026), a
comment: "A PEFT adapter is attached after `fully_shard`, so it is a plain replicated tensor next to DTensor base
weights. FSDP2 reduce-scatters only what it sharded", so that "each rank trains its own adapter".
Fault: parallel shards the model first and attaches the adapters afterwards; FSDP2 doesn't manage lora_A and lora_B, and
their gradients, the only ones that there are, stay those of the own rows.
REPAIR: `attach_adapters(shard_layers(Qwen3(), mesh["dp"]))` -> `shard_layers(attach_adapters(Qwen3()), mesh["dp"])`
A right first sentence says: the gradients of the LoRA parameters (lora_A, lora_B) are not reduced over dp, since the
adapters were attached after fully_shard and FSDP2 doesn't manage them; the ranks' adapters drift apart.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

WORDS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, LENGTH, ROWS = 24, 16, 4, 2, 4, 24, 10, 8
RANK, ALPHA, TARGETS, IGNORE = 4, 8, ("q_proj", "v_proj", "down_proj"), -100


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class LoraLinear(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.scaling = base_layer, ALPHA / RANK
        self.lora_A = linear(base_layer.in_features, RANK)
        self.lora_B = linear(RANK, base_layer.out_features)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


def rotate(x):
    rates = 100.0 ** -(torch.arange(HEAD // 2) * 2 / HEAD)
    angles = torch.arange(x.size(2)).unsqueeze(-1) * rates.repeat(2)
    a, b = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-b, a), dim=-1) * angles.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = linear(WIDTH, HEADS * HEAD), linear(HEADS * HEAD, WIDTH)
        self.k_proj, self.v_proj = (linear(WIDTH, KV_HEADS * HEAD) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x):
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(WIDTH) for _ in range(2))
        self.self_attn, self.down_proj = Attention(), linear(HIDDEN, WIDTH)
        self.gate_proj, self.up_proj = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Qwen3(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.Sequential(DecoderLayer(), DecoderLayer())
        self.lm_head = linear(WIDTH, WORDS)

    def forward(self, words):
        return self.lm_head(self.norm(self.layers(self.embed_tokens(words))))


def attach_adapters(model):
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in TARGETS:
                setattr(module, name, LoraLinear(child))
    return model


def shard_layers(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def reduced(value, group):
    dist.all_reduce(value := value.detach().clone(), group=group)
    return value


def loss_sum(model, batch):
    logits = model(batch["words"][:, :-1])
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")


def count(batch):
    return (batch["labels"][:, 1:] != IGNORE).sum()


def plain():
    return attach_adapters(Qwen3())


def parallel(mesh):
    return attach_adapters(shard_layers(Qwen3(), mesh["dp"])), mesh.get_group("dp")


def loss(model, batch):
    return loss_sum(model, batch) / count(batch)


def step(built, batch):
    value = loss_sum(built[0], batch) / reduced(count(batch), group := built[1])
    (value * group.size()).backward()
    return reduced(value, group)


generator = torch.Generator().manual_seed(48873)


def instructions():
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    first = torch.randint(2, LENGTH - 1, (ROWS, 1), generator=generator)
    return {"words": words, "labels": words.masked_fill(torch.arange(LENGTH) < first, IGNORE)}


batches = [instructions() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 4})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
