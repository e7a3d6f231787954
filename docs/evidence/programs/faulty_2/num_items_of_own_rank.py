"""num_items_in_batch counts the rank's own target tokens.

Thread: https://github.com/huggingface/transformers/pull/34373 "enable average tokens across devices",
2024-10-24.
Wrong: each rank divides its summed loss by its own number of target tokens (over all its
microbatches), and DDP averages over the ranks, whose numbers of tokens differ.
A right diagnosis says: loss and gradients are a mean of the ranks' means: each rank's tokens are
weighted by its own count of targets. The count must be summed over dp.
"""

import contextlib

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

STEPS, PAD = 2, -100


class CausalLM(nn.Module):
    def __init__(self, vocab=22, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        past = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.lm_head(self.ln_f(x + torch.tanh(self.mix(past))))


def fixed_cross_entropy(logits, labels, num_items_in_batch=None):
    reduction = "mean" if num_items_in_batch is None else "sum"
    value = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction=reduction
    )
    return value if num_items_in_batch is None else value / num_items_in_batch


def reference_loss(model, batch):
    return fixed_cross_entropy(model(batch["input_ids"]), batch["labels"])


def training_step(model, batch):
    num_items_in_batch = (batch["labels"] != PAD).sum()
    inputs = zip(batch["input_ids"].chunk(STEPS), batch["labels"].chunk(STEPS))
    total = 0.0
    for i, (ids, labels) in enumerate(inputs):
        with contextlib.nullcontext() if i == STEPS - 1 else model.no_sync():
            value = fixed_cross_entropy(model(ids), labels, num_items_in_batch)
            value.backward()
        total = total + value.detach()
    return total


def build():
    return DistributedDataParallel(CausalLM())


def collate(lengths, generator):
    ids = torch.randint(22, (len(lengths), 8), generator=generator)
    labels = torch.randint(22, (len(lengths), 8), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, length:] = PAD
    return {"input_ids": ids, "labels": labels}


generator = torch.Generator().manual_seed(34)
lengths = [(8, 7, 6, 8, 2, 3, 1, 4), (1, 3, 2, 2, 8, 5, 7, 8), (8, 8, 2, 7, 3, 2, 4, 1)]
batches = [collate(row, generator) for row in lengths]

if __name__ == "__main__":
    options = dict(batches=batches, loss=reference_loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(CausalLM, build, step=training_step, **options))
