"""Gradient accumulation with a running count of tokens, which is all-reduced in place after every microbatch.

Thread: https://github.com/meta-pytorch/torchtune/pull/1917 "Restore backward after each batch for grad accum" (review
of 2024-10-31: "the way num_tokens is being calculated/reset seems a bit fishy": 25 of step 1 are on both GPUs, 10 and
3 are added, and all of it is reduced again).
Wrong: after the first microbatch every rank holds the count of all ranks, and the next all-reduce multiplies it with
the number of ranks. The tokens of early microbatches are counted 2, 4, ... times in the divisor.
EXPECT: the loss and all gradients are too small by one common factor on all ranks, another in each step: they are
divided by more tokens than the batch has, since the running count of tokens is all-reduced again in each microbatch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, LENGTH, ACCUMULATION, IGNORE = 13, 12, 6, 2, -100


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 24), nn.SiLU(), nn.Linear(24, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(self.norm(x)))


def summed_loss(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    return cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")


def loss(model, batch):
    return summed_loss(model, batch) / (batch["labels"] != IGNORE).sum()


def parallel(mesh):
    return DistributedDataParallel(LM(), process_group=mesh.get_group("dp"))


def scale_grads(model, scale):
    for p in model.parameters():
        p.grad.mul_(scale)


def train_step(model, batch):
    num_tokens, running_loss = torch.tensor(0), torch.tensor(0.0)
    micro_batches = zip(*(t.chunk(ACCUMULATION) for t in batch.values()))
    for i, parts in enumerate(micro_batches):
        micro = dict(zip(batch, parts))
        model.require_backward_grad_sync = i == ACCUMULATION - 1
        current_loss = summed_loss(model, micro)
        current_loss.backward()
        running_loss += current_loss.detach()
        num_tokens += (micro["labels"] != IGNORE).sum()
        dist.all_reduce(num_tokens)
    dist.all_reduce(running_loss)
    scale_grads(model, dist.get_world_size() / num_tokens)
    return running_loss / num_tokens


generator = torch.Generator().manual_seed(1917)


def draw():
    tokens, labels = torch.randint(VOCAB, (2, 8, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (8, 1), generator=generator)
    return {"tokens": tokens, "labels": labels.masked_fill(torch.arange(LENGTH) >= lengths, IGNORE)}


batches = [draw() for _ in range(3)]
arguments = LM, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=train_step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
