"""A DDP communication hook that reduces by all-to-all and a sum, and gathers the averaged parts.

Thread: https://github.com/facebookresearch/fairscale/pull/413 "Add FullyShardedDataParallel (FSDP)" (an all-reduce
is a reduce-scatter and an all-gather), 2021-02-23. With token counts that differ between the ranks
(https://github.com/karpathy/nanoGPT/issues/605, accumulation, 2025-04-25).
Right: the loss of each microbatch is a sum divided by the tokens of the whole step, so the hook sums; the bucket is
padded to a multiple of dp; only the last microbatch synchronizes.
Must not be accused: gradients that the hook sums, a loss that is a part of the whole, no_sync.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, MICROBATCHES = 12, 8, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 18), nn.GELU(), nn.Linear(18, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.mlp(x)))


def scatter_and_gather(group, bucket):
    buffer, size = bucket.buffer(), group.size()
    parts = pad(buffer, (0, -len(buffer) % size)).view(size, -1)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    whole = [torch.empty_like(parts[0]) for _ in range(size)]
    dist.all_gather(whole, received.sum(0), group=group)
    future = torch.futures.Future()
    future.set_result(torch.cat(whole)[: len(buffer)])
    return future


def token_sum(model, batch):
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def loss(model, batch):
    return token_sum(model, batch) / (batch["labels"] != -100).sum()


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(Model(), process_group=group)
    model.register_comm_hook(group, scatter_and_gather)
    return model


def step(model, batch):
    tokens, total = (batch["labels"] != -100).sum(), 0.0
    dist.all_reduce(tokens)
    for i in range(MICROBATCHES):
        part = {name: t.chunk(MICROBATCHES)[i] for name, t in batch.items()}
        with nullcontext() if i == MICROBATCHES - 1 else model.no_sync():
            value = token_sum(model, part) / tokens
            value.backward()
        total = total + value.detach()
    return total


def draw(generator):
    batch = {n: torch.randint(VOCAB, (8, 5), generator=generator) for n in ("tokens", "labels")}
    batch["labels"][torch.rand(8, 5, generator=generator) < 0.4] = -100
    return batch


generator = torch.Generator().manual_seed(413)
batches = [draw(generator) for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
