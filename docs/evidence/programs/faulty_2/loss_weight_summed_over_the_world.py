"""FSDP2 over dp and DTensor tensor parallelism; the number of tokens is summed over all ranks.

Thread: https://github.com/areal-project/AReaL/pull/335 "fix fsdp engine: qwen3 TP q/k norm wrapping,
gradient clipping, the scale of grad norm, and sft scripts", 2025-09-13 ("improper reduction of
`total_loss_weight` ... Specify the reduce group to be `dp_group`").
Wrong: total_loss_weight is all-reduced over dp x tp. The ranks of tp have the same tokens, so that each is
counted tp times.
A right diagnosis says: all gradients are 0.5 times as large as on one process, 1 over the degree of tp
(dp has the same degree here): the divisor counts the tokens of each rank of tp. (So is the mean of the
ranks' losses, which are multiplied by dp.)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, VOCAB, IGNORE = 16, 20, -100


class Qwen3MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.gate_proj, self.up_proj = (nn.Linear(DIM, 32, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(32, DIM, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down_proj(silu(self.gate_proj(h)) * self.up_proj(h))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Qwen3MLP() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def sft_loss(logits, labels):
    return cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def plain_loss(model, batch):
    return sft_loss(model(batch["ids"]), batch["labels"]) / (batch["labels"] != IGNORE).sum()


def create_engine(mesh):
    model = Actor()
    for layer in model.layers:
        plan = {
            "gate_proj": ColwiseParallel(),
            "up_proj": ColwiseParallel(),
            "down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), mesh


def train_batch(engine, batch):
    model, mesh = engine
    total_loss_weight = (batch["labels"] != IGNORE).sum()
    dist.all_reduce(total_loss_weight)
    loss = sft_loss(model(batch["ids"]), batch["labels"]) / total_loss_weight
    loss = loss * mesh["dp"].size()  # fully_shard averages
    loss.backward()
    return loss


def make_batch(generator):
    ids = torch.randint(VOCAB, (4, 6), generator=generator)
    labels = torch.randint(VOCAB, (4, 6), generator=generator)
    prompt = torch.tensor([1, 4, 2, 0])
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(6) < prompt[:, None], IGNORE)}


rng = torch.Generator().manual_seed(39)
batches = [make_batch(rng) for _ in range(3)]

if __name__ == "__main__":
    axes = {"dp": 2, "tp": 2}
    options = dict(batches=batches, loss=plain_loss, ranks=axes, split="dp", step=train_batch)
    print(titanlite.compare(Actor, create_engine, **options))
