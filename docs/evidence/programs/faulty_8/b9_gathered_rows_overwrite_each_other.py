"""Data parallelism that exchanges only the touched rows of the embedding's gradient: rows of several ranks are not added.

Thread: horovod/horovod issue #341 "Is the indices and values of tf.IndexedSlices merged after the ALLGATHER operation?"
(2018: rank 0 has rows 0 and 1, rank 1 has rows 0 and 2), and sql-machine-learning/elasticdl pull request #1588 (2019).
Wrong: indices and values of all ranks are gathered and written into the gradient with an indexed assignment. A row that
occurs on both ranks keeps the values of the last rank only.
PLACE: embed.weight, backward pass: reduce_rows, on all ranks, the rows of tokens that occur on more than one rank
KIND: gathered row-sparse gradients assigned instead of added: rows used by several ranks keep one rank's part
REPAIR: `total[rows] = part` -> `total[rows] += part`
EXPECT: the forward pass agrees; the gradient of embed.weight alone is wrong, the same on all ranks, only in the rows of
tokens that both ranks have: these hold the part of rank 1 alone, without that of rank 0. Rows of one rank's tokens and all
other gradients agree. Add the gathered rows instead of assigning them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, CLASSES = 40, 8, 5


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x + x.mean(1, keepdim=True)))))


class TextClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.classify = nn.Linear(DIM, CLASSES)

    def forward(self, tokens):
        x = self.embed(tokens)
        for mixer in self.mixers:
            x = mixer(x)
        return self.classify(x.mean(1))


def gather_uneven(x, counts, group):
    """The ranks' tensors, which have different numbers of rows."""
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def reduce_rows(gradient, touched, group=None):
    """The sum of the ranks' gradients of an embedding, from the rows that each of them touched."""
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(touched)]), group=group)
    counts = [int(count) for count in counts]
    indices = gather_uneven(touched, counts, group)
    values = gather_uneven(gradient[touched], counts, group)
    total = torch.zeros_like(gradient)
    for rows, part in zip(indices, values, strict=True):
        total[rows] = part
    return total


def average_gradients(model, tokens):
    for p in model.parameters():
        if p is model.embed.weight:
            p.grad = reduce_rows(p.grad, tokens.unique())
        else:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    model = TextClassifier()
    for p in model.parameters():
        dist.broadcast(p.data, src=0, group=mesh.get_group("dp"))
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    average_gradients(model, batch["tokens"])
    return value


generator = torch.Generator().manual_seed(103)


def draw():
    tokens = torch.randint(VOCAB, (8, 4), generator=generator)
    return {"tokens": tokens, "labels": torch.randint(CLASSES, (8,), generator=generator)}


batches = [draw() for _ in range(3)]
arguments = TextClassifier, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
