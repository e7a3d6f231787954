"""Sentence pairs under FSDP2: one encoder reads both sentences in two calls, and there is one backward pass for both.

Thread: of the kind facebookresearch/fairscale issue #780 (2021), a module that is called several times within a forward
pass, and huggingface/sentence-transformers issue #654 "Siamese architecture" (2020).
Correct: FSDP2 gathers the weights for each call, and after the backward pass the shards' gradients hold the sum over both
calls, averaged over the ranks. The loss is a mean over pairs, and all ranks have the same number of pairs.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cosine_similarity, gelu, mse_loss

import titanlite

VOCAB, DIM = 12, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        x = x + torch.tanh(self.mix(x.mean(1, keepdim=True)) * x)
        return x + self.down(gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.project = Encoder(), nn.Linear(DIM, DIM)

    def forward(self, first, second):
        first, second = self.encoder(first), self.encoder(second)
        return cosine_similarity(self.project(first), self.project(second))


def loss(model, batch):
    return mse_loss(model(batch["first"], batch["second"]), batch["similarity"])


def parallel(mesh):
    model = Pairs()
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.encoder, mesh=mesh)
    return fully_shard(model, mesh=mesh)


generator = torch.Generator().manual_seed(238)


def draw():
    first, second = torch.randint(VOCAB, (2, 8, 5), generator=generator)
    similarity = torch.rand(8, generator=generator)
    return {"first": first, "second": second, "similarity": similarity}


batches = [draw() for _ in range(3)]
arguments = Pairs, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
