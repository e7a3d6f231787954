"""A pipeline by hand with multi-token prediction: the last stage's copy of the embedding keeps its gradient to itself.

Thread: pytorch/torchtitan issue #933 "[Feature] Add Multi-Token Prediction module" (2025): with pipelining, "the shared
embedding and unembedding layers' gradients need to be manually all-reduced".
Wrong: the MTP module on the last stage looks up the next tokens in a copy of the first stage's embedding. The copies'
gradients are added only if the head is tied; with an untied head, each stage steps with its own part.
PLACE: embed.weight on both stages, backward pass (reduction of shared gradients)
KIND: gradient of the last stage's copy of the embedding (for multi-token prediction) not summed with the first stage's
REPAIR: `if TIED_HEAD:` -> `if TIED_HEAD or MTP:`
EXPECT: the forward pass and the loss agree in step 1; the gradient of embed.weight alone is wrong, on both ranks, and
differs between them: rank 0 has the part of the first stage's look-up, rank 1 that of the MTP module. Their sum is the
right gradient: add them over the two stages that share the weight.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LAYERS, MICROBATCHES, MTP_WEIGHT = 16, 8, 4, 2, 0.3
TIED_HEAD, MTP = False, True


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.down(torch.relu(self.up(self.norm(x + past))))


class NextNext(nn.Module):
    """One MTP depth: the hidden state and the next token's embedding give the token after it."""

    def __init__(self):
        super().__init__()
        self.norm_h, self.norm_e = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.project, self.block = nn.Linear(2 * DIM, DIM, bias=False), Block()

    def forward(self, x, embedded):
        return self.block(self.project(torch.cat([self.norm_h(x), self.norm_e(embedded)], -1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.mtp = NextNext()
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def body(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x

    def criterion(self, x, batch):
        """Cross-entropy of the next token and, weighted, of the one after it."""
        ahead = self.mtp(x, self.embed(batch["next"]))
        main = cross_entropy(self.head(x).flatten(0, 1), batch["next"].flatten())
        return main + MTP_WEIGHT * cross_entropy(
            self.head(ahead).flatten(0, 1), batch["after"].flatten()
        )

    def forward(self, batch):
        return self.criterion(self.body(self.embed(batch["tokens"])), batch)


def loss(model, batch):
    return model(batch)


def parallel(mesh):
    model, index = Model(), mesh.get_local_rank("pp")
    for i in range(LAYERS):
        if i * 2 // LAYERS != index:
            del model.blocks[str(i)]
    if index == 0:
        del model.mtp, model.head
    return model


def reduce_shared_gradients(model):
    if TIED_HEAD:
        dist.all_reduce(model.embed.weight.grad)


def step(model, batch):
    first, kept, total = dist.get_rank() == 0, [], 0.0
    parts = [dict(zip(batch, p)) for p in zip(*(v.chunk(MICROBATCHES) for v in batch.values()))]
    for part in parts:
        if first:
            x = model.body(model.embed(part["tokens"]))
            dist.send(x.detach().contiguous(), 1)
        else:
            x = torch.empty(*part["tokens"].shape, DIM, dtype=model.head.weight.dtype)
            dist.recv(x, 0)
            x.requires_grad_()
        kept.append(x)
    for x, part in zip(kept, parts):
        if first:
            gradient = torch.empty_like(x)
            dist.recv(gradient, 1)
            x.backward(gradient)
        else:
            value = model.criterion(model.body(x), part) / MICROBATCHES
            value.backward()
            dist.send(x.grad, 0)
            total = total + value.detach()
    reduce_shared_gradients(model)
    return None if first else total


generator = torch.Generator().manual_seed(109)


def draw():
    text = torch.randint(VOCAB, (4, 8), generator=generator)
    return {"tokens": text[:, :-2], "next": text[:, 1:-1], "after": text[:, 2:]}


batches = [draw() for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
