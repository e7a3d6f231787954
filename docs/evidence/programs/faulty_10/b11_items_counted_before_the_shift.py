"""Token-weighted gradient accumulation under DDP: the targets are counted before the labels are shifted.

Thread: huggingface/transformers issue #38448 "num_items_in_batch larger than the actual useful token when computing loss"
(2025): the count is `sum([(batch["labels"].ne(-100)).sum() for batch in batch_samples])`.
Fault: in step, the first label of each row is counted, although the model shifts the labels and never predicts it.
REPAIR: `(part["labels"] != -100).sum()` -> `(part["labels"][:, 1:] != -100).sum()`
Expected: the logits agree; from step 1 on the loss and all gradients are too small by one factor, on both ranks and in all
microbatches: num_items in step counts the labels before the shift, one too many per row. Count labels[:, 1:].
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad, silu
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

VOCAB, DIM, ACCUMULATION = 14, 8, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(DIM), nn.Conv1d(DIM, DIM, 3)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        y = self.conv(pad(self.norm(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + self.out(silu(y))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.Sequential(Layer(), Layer())
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids, labels, num_items_in_batch):
        logits = self.lm_head(self.layers(self.embed_tokens(input_ids)))
        shifted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return cross_entropy(*shifted, ignore_index=-100, reduction="sum") / num_items_in_batch


def loss(model, batch):
    num_items = (batch["labels"][:, 1:] != -100).sum()
    return model(batch["input_ids"], batch["labels"], num_items)


def parallel(mesh):
    return DDP(CausalLM(), process_group=mesh.get_group("dp"))


def microbatches(batch):
    chunks = {key: value.chunk(ACCUMULATION) for key, value in batch.items()}
    return [{key: chunks[key][i] for key in batch} for i in range(ACCUMULATION)]


def step(model, batch):
    parts = microbatches(batch)
    num_items = sum((part["labels"] != -100).sum() for part in parts)
    dist.all_reduce(num_items)
    total = torch.zeros(())
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        with nullcontext() if last else model.no_sync():
            # DDP averages over the processes, but all tokens are in num_items already.
            value = dist.get_world_size() * model(part["input_ids"], part["labels"], num_items)
            value.backward()
        total += value.detach()
    return total


rng = torch.Generator().manual_seed(301)


def draw():
    ids = torch.randint(VOCAB, (8, 7), generator=rng)
    lengths = torch.randint(3, 8, (8, 1), generator=rng)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(7) >= lengths, -100)}


batches = [draw() for _ in range(3)]
arguments = CausalLM, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
