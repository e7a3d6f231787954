"""FSDP2: summed losses, gradients scaled by 1 / number of tokens of all ranks.

Thread: https://github.com/meta-pytorch/torchtune/pull/2172 "Fix gradient scaling to account for
world_size normalization", 2024-12-18.
Wrong: FSDP averages over the ranks, and scale_grads divides by the tokens of all ranks: the
gradients are divided by the number of ranks once too often. The reported loss is right.
A right diagnosis says: all gradients are 0.5 times as large, which is 1 over the degree of dp: they
are divided (averaged) once too often.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import titanlite

PAD = -100


class Decoder(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.output(self.norm(h))


def plain_loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def scale_grads(model, scaler):
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= scaler


def train_step(model, batch):
    num_tokens = (batch["labels"] != PAD).sum()
    current_loss = plain_loss(model, batch) * num_tokens
    current_loss.backward()
    running_loss = current_loss.detach().clone()
    dist.all_reduce(num_tokens)
    dist.all_reduce(running_loss)
    scale_grads(model, 1 / num_tokens)
    return running_loss / num_tokens


def parallel(mesh):
    model = Decoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


generator = torch.Generator().manual_seed(2)
batches = []
for _ in range(3):
    tokens = torch.randint(20, (4, 7), generator=generator)
    labels = torch.randint(20, (4, 7), generator=generator)
    labels[0, :4] = PAD
    labels[3, 5:] = PAD
    batches.append({"tokens": tokens, "labels": labels})

if __name__ == "__main__":
    print(
        titanlite.compare(
            Decoder,
            parallel,
            batches=batches,
            loss=plain_loss,
            ranks={"dp": 2},
            split="dp",
            step=train_step,
        )
    )
