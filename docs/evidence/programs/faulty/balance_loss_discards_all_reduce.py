"""A load-balancing loss over the global batch whose all-reduce is discarded.

Thread: https://github.com/microsoft/ltp-megatron-lm/pull/68 "Algorithm - Fix all-reduce for
global-batch load balancing loss", 2025-07-02.
Wrong: torch.distributed.nn.all_reduce is not in place; its result is dropped, so every rank uses the
routing counts of its own tokens.
A right diagnosis says: the model's outputs agree, but the loss (its balancing term) and the gradients
of the routers differ: the tokens per expert are counted over the rank's own tokens, not over dp.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

EXPERTS, TOP_K, COEFF = 4, 2, 0.1


def global_batch_load_balancing_loss(probs, routing_map):
    routing_count = routing_map.sum(0).to(probs.dtype)
    num_tokens = probs.shape[0]
    if dist.is_initialized():
        torch.distributed.nn.functional.all_reduce(routing_count)
        num_tokens *= dist.get_world_size()
    routing_fraction = routing_count / (num_tokens * TOP_K)
    return COEFF * EXPERTS * (routing_fraction * probs.mean(0)).sum()


class MoE(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 24), nn.SiLU(), nn.Linear(24, dim)) for _ in range(EXPERTS)
        )
        self.balance_loss = None

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        top = probs.topk(TOP_K, -1).indices
        routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, top, True)
        self.balance_loss = global_batch_load_balancing_loss(probs, routing_map)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return ((probs * routing_map).unsqueeze(-1) * outputs).sum(1)


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.moes = nn.ModuleList(MoE(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for moe in self.moes:
            x = x + moe(x)
        return self.head(x), sum(moe.balance_loss for moe in self.moes)


def loss(model, batch):
    logits, balance = model(batch["x"])
    return cross_entropy(logits, batch["y"].flatten()) + balance


def build():
    return DDP(Model())


generator = torch.Generator().manual_seed(6)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Model, build, **options))
