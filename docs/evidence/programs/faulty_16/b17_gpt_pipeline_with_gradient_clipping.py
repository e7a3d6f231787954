"""A small GPT in three pipeline stages with a GPipe schedule, whose optimizer clips the gradients by their norm.

Thread: pytorch/torchtitan issue #596 "Gradient norm clipping with pipeline parallelism (PP)" (2024), fixed by pull request
#649 "Fix PP clip_grad_norm" (2024): with pipeline stages each rank computed the gradient norm of its own stage's parameters
alone and clipped by it, instead of the norm over all stages.
Fault: parallel() builds each stage's ClippedAdamW without a norm_group, so clip() takes the norm of the own stage only; each
stage's gradients are scaled by a factor of their own.
REPAIR: `ClippedAdamW(model.parameters(), lr=LR)` -> `ClippedAdamW(model.parameters(), lr=LR, norm_group=group)`
A right first sentence says: the gradients are clipped with the norm of each pipeline stage's own parameters instead of the
norm of the whole model's, which must be summed over the pipeline ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, MICROBATCHES, MAX_NORM, LR = 23, 16, 2, 6, 4, 0.5, 3e-3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.positions.weight
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips first; where parameters lie on several ranks, norm_group has those ranks."""

    def __init__(self, parameters, lr, norm_group=None):
        super().__init__(parameters, lr=lr, weight_decay=0.1)
        self.norm_group = norm_group

    @torch.no_grad()
    def clip(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        if self.norm_group is not None:
            square = norm.square()
            dist.all_reduce(square, group=self.norm_group)
            norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm)

    def step(self, closure=None):
        self.clip()
        return super().step(closure)


def cut_stage(model, rank, stages):
    layers = len(model.layers)
    for index in range(layers):
        if index * stages // layers != rank:
            del model.layers[str(index)]
    if rank > 0:
        model.tokens = model.positions = None
    if rank < stages - 1:
        model.norm = model.head = None
    return model


class GPipe:
    def __init__(self, model, group):
        self.model, self.rank, self.stages = model, dist.get_rank(group), dist.get_world_size(group)
        self.first, self.last = self.rank == 0, self.rank == self.stages - 1

    def forward(self, tokens, targets):
        x = tokens
        if not self.first:
            x = next(self.model.parameters()).new_empty(*tokens.shape, WIDTH)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        y = self.model(x)
        if self.last:
            y = F.cross_entropy(y.flatten(0, 1), targets.flatten()) / MICROBATCHES
        else:
            dist.send(y.detach().contiguous(), self.rank + 1)
        return x, y

    def backward(self, x, y):
        if self.last:
            y.backward()
        else:
            grad = torch.empty_like(y)
            dist.recv(grad, self.rank + 1)
            y.backward(grad)
        if not self.first:
            dist.send(x.grad.contiguous(), self.rank - 1)

    def run(self, tokens, targets):
        micro_batches = zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES))
        passes = [self.forward(*micro_batch) for micro_batch in micro_batches]
        for x, y in passes:
            self.backward(x, y)
        if self.last:
            total = torch.stack([y.detach() for _, y in passes]).sum()
        else:
            total = next(self.model.parameters()).new_zeros(())
        dist.broadcast(total, self.stages - 1)
        return total


def plain():
    return GPT()


def parallel(mesh):
    group = mesh.get_group("pp")
    model = cut_stage(GPT(), dist.get_rank(group), dist.get_world_size(group))
    return model, ClippedAdamW(model.parameters(), lr=LR), GPipe(model, group)


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def step(built, batch):
    return built[2].run(*batch)


generator = torch.Generator().manual_seed(596)
batches = []
for _ in range(3):
    text = torch.randint(0, VOCAB, (8, LENGTH + 1), generator=generator)
    batches.append((text[:, :-1], text[:, 1:]))

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"pp": 3},
    optimizer=lambda parameters: ClippedAdamW(parameters, lr=LR),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
