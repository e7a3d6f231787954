"""A trainer for supervised fine-tuning: DDP, gradient accumulation and a loss averaged over the labelled tokens.

Thread: huggingface/transformers issue #34242 "Add DDP token averaging for equivalent non-parallel training similar to #34191"
(2024): num_items_in_batch covers the accumulation steps of one process only, so DDP training is not the single-process one.
Fault: in `Trainer.train_step`, each rank divides its summed loss by the number of labelled tokens of its own micro batches,
and DDP averages the results: tokens on ranks with few labels weigh more than tokens on ranks with many.
REPAIR: `num_items = self.count_items(micro_batches)` -> `num_items = self.total(self.count_items(micro_batches)) / self.world`
A right first sentence says: Trainer.train_step normalises the loss by the local number of non-ignored labels instead of the
number over all data parallel ranks, so DDP averages means over unequal token counts.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

VOCAB, SEQUENCE, WIDTH, HEADS, KV_HEADS, LAYERS, IGNORE = 48, 10, 16, 4, 2, 2, -100


def rotate(x, base=100.0):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1
    )


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, HEADS * head, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.o_proj = nn.Linear(HEADS * head, WIDTH, bias=False)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (
            f(x).unflatten(-1, (KV_HEADS, -1)).transpose(1, 2) for f in (self.k_proj, self.v_proj)
        )
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (rotate(k), v))
        return self.o_proj(
            F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.self_attn = LlamaAttention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)
        self.mlp = LlamaMLP()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(LlamaDecoderLayer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def causal_lm_loss(logits, labels, num_items=None):
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items is None:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / num_items


def loss(model, batch):
    return causal_lm_loss(model(batch["input_ids"]), batch["labels"])


class Trainer:
    def __init__(self, model, gradient_accumulation_steps=2):
        self.model = DDP(model)
        self.steps = gradient_accumulation_steps
        self.world = dist.get_world_size()

    def get_micro_batches(self, part):
        chunks = {name: tensor.chunk(self.steps) for name, tensor in part.items()}
        return [{name: chunks[name][i] for name in chunks} for i in range(self.steps)]

    def count_items(self, micro_batches):
        return torch.stack(
            [(batch["labels"][:, 1:] != IGNORE).sum() for batch in micro_batches]
        ).sum()

    def total(self, value):
        dist.all_reduce(value)
        return value

    def train_step(self, part):
        micro_batches = self.get_micro_batches(part)
        num_items = self.count_items(micro_batches)
        logged = torch.zeros(())
        for i, batch in enumerate(micro_batches):
            with self.model.no_sync() if i + 1 < self.steps else nullcontext():
                output = causal_lm_loss(self.model(batch["input_ids"]), batch["labels"], num_items)
                output.backward()
            logged += output.detach()
        return self.total(logged) / self.world


def parallel():
    trainer = Trainer(LlamaForCausalLM())
    return trainer.model, trainer


def step(built, part):
    return built[1].train_step(part)


def make_batches(steps=3, rows=8):
    generator = torch.Generator().manual_seed(34242)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (rows, SEQUENCE), generator=generator)
        prompt = torch.randint(2, SEQUENCE - 1, (rows, 1), generator=generator)
        batches.append(
            dict(
                input_ids=tokens, labels=tokens.masked_fill(torch.arange(SEQUENCE) < prompt, IGNORE)
            )
        )
    return batches


batches = make_batches()
arguments = LlamaForCausalLM, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
