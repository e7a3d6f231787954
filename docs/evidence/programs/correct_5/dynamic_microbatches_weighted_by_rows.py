"""Microbatches filled up to a budget of tokens, other numbers of them on each rank, each weighted by its rows.

Thread: https://github.com/verl-project/verl/pull/141 "[misc] fix: gradient accumulation in seq balance" ("previous
gradient accumulation value is computed by micro_batch_size, which is wrong when using dynamic_bsz"), 2025-01-27.
Right: the loss is a mean over rows, and a microbatch counts with its share of the rank's rows. DDP reduces in the
last microbatch alone.
Must not be accused: ranks that run the model once and four times in one step, microbatches of unequal size and
length, a backward pass per microbatch with different factors.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, LENGTH, BUDGET = 12, 16, 8, 12


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.SiLU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(self.norm(x)))


def loss(model, batch):
    logp = model(batch["tokens"]).log_softmax(-1)
    taken = logp.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    mask = torch.arange(taken.shape[1]) < batch["lengths"].unsqueeze(1)
    per_row = (taken * mask).sum(1) / batch["lengths"]
    return -(batch["advantages"] * per_row).mean()


def rearrange_micro_batches(batch):
    micro_batches, rows, tokens = [], [], 0
    for i in batch["lengths"].argsort(descending=True).tolist():
        if rows and tokens + int(batch["lengths"][i]) > BUDGET:
            micro_batches.append(rows)
            rows, tokens = [], 0
        rows.append(i)
        tokens += int(batch["lengths"][i])
    return [{n: t[rows] for n, t in batch.items()} for rows in [*micro_batches, rows]]


def trimmed(batch):
    longest = int(batch["lengths"].max())
    return {n: t[:, :longest] if t.ndim == 2 else t for n, t in batch.items()}


def parallel(mesh):
    return DistributedDataParallel(Policy(), process_group=mesh.get_group("dp"))


def step(model, batch):
    micro_batches, total = rearrange_micro_batches(batch), 0.0
    for i, micro in enumerate(micro_batches):
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        weight = len(micro["lengths"]) / len(batch["lengths"])
        value = loss(model, trimmed(micro)) * weight
        value.backward()
        total += value.detach()
    return total


generator = torch.Generator().manual_seed(141)


def rollout():
    short = torch.randint(1, 5, (4,), generator=generator)
    return {
        "tokens": torch.randint(VOCAB, (8, LENGTH), generator=generator),
        "actions": torch.randint(VOCAB, (8, LENGTH), generator=generator),
        "advantages": torch.randn(8, generator=generator),
        "lengths": torch.cat([short, torch.randint(5, LENGTH + 1, (4,), generator=generator)]),
    }


batches = [rollout() for _ in range(3)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
