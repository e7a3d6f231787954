"""Supervised fine-tuning under DDP without padding: each rank joins its samples to one long row with restarting positions.

Thread: huggingface/transformers pull request #31629 "Enhancing SFT Training Efficiency Using Packing and FlashAttention2 with
Position IDs" (2024): samples are concatenated instead of padded, and position_ids that restart at 0 tell the attention where
each sample begins; pull request #34373 "enable average tokens across devices" (2024) scales the loss by the tokens of all
devices.
Correct: the ranks' activations have another shape than the plain model's (one row, no padding) and another length on each rank.
Attention is causal within a sample, positions are those of the sample, and labels are shifted before packing, so every real
token has the same logits. A rank's loss is its sum times the world size by the tokens of all ranks: not a mean of its own, but
DDP's average of these is the mean over all tokens.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS, LAYERS, MAX_LENGTH, IGNORE = 25, 16, 2, 3, 10, -100


def attention_mask_of(position_ids):
    """Which query sees which key: keys of the same sample that are not later."""
    sample = (position_ids == 0).cumsum(-1)
    same = sample[:, :, None] == sample[:, None, :]
    return (same & torch.ones_like(same).tril()).unsqueeze(1)


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv_proj = nn.Linear(DIM, 3 * DIM, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.gate_up_proj = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down_proj = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x, mask):
        b, s, _ = x.shape
        q, k, v = (
            t.view(b, s, HEADS, -1).transpose(1, 2)
            for t in self.qkv_proj(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, s, DIM))
        gate, up = self.gate_up_proj(self.ln_2(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.embed_positions = nn.Embedding(MAX_LENGTH, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        mask = attention_mask_of(position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(self.norm(x))


def flatten(batch):
    """One row of all samples, without padding, and the positions within the samples."""
    real = batch["attention_mask"].bool()
    positions = torch.arange(real.shape[1]).expand_as(real)
    return batch["input_ids"][real][None], positions[real][None], batch["labels"][real][None]


def parallel():
    return DistributedDataParallel(CausalLM())


def step(model, batch):
    input_ids, position_ids, labels = flatten(batch)
    num_items_in_batch = (labels != IGNORE).sum()
    dist.all_reduce(num_items_in_batch)
    logits = model(input_ids, position_ids)
    total = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    value = total * dist.get_world_size() / num_items_in_batch
    value.backward()
    return value


def loss(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)


def make_batches(count, rows):
    generator = torch.Generator().manual_seed(23)
    for _ in range(count):
        length = torch.randint(4, MAX_LENGTH + 1, (rows, 1), generator=generator)
        prompt = torch.randint(1, 4, (rows, 1), generator=generator)
        position = torch.arange(MAX_LENGTH)
        ids = torch.randint(1, VOCAB, (rows, MAX_LENGTH), generator=generator) * (position < length)
        labels = ids.roll(-1, 1).masked_fill(
            (position < prompt - 1) | (position >= length - 1), IGNORE
        )
        yield {"input_ids": ids, "labels": labels, "attention_mask": (position < length).long()}


arguments = CausalLM, parallel
options = dict(
    batches=list(make_batches(3, rows=6)), loss=loss, step=step, split="dp", ranks={"dp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
