"""FSDP2 x TP: gradients are scaled by the world size instead of the data-parallel degree.

Thread: https://github.com/meta-pytorch/torchtune/pull/2436 "Bugfixes: Grad norm scaling in TP",
2025-02-25.
Wrong: world_size / num_tokens undoes FSDP's average, but FSDP averages over dp ranks only.
A right diagnosis says: all gradients are 2 times too large, and 2 is the degree of tp. The loss
agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, silu

import titanlite


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Decoder(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(FeedForward(dim, 32) for _ in range(2))
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.output(h)


def plain_loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Decoder()
    plan = {
        "layers.*.w1": ColwiseParallel(),
        "layers.*.w3": ColwiseParallel(),
        "layers.*.w2": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.dp_group = mesh.get_group("dp")
    return model


def train_step(model, batch):
    num_tokens = torch.tensor(batch["labels"].numel())
    loss = plain_loss(model, batch) * num_tokens
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(num_tokens, group=model.dp_group)
    dist.all_reduce(total, group=model.dp_group)
    for p in model.parameters():
        p.grad *= dist.get_world_size() / num_tokens
    return total / num_tokens


generator = torch.Generator().manual_seed(2)
batches = [
    {name: torch.randint(20, (6, 5), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Decoder,
            parallel,
            batches=batches,
            loss=plain_loss,
            ranks={"dp": 2, "tp": 2},
            split="dp",
            step=train_step,
        )
    )
