"""A chess-move model with sequence parallelism by functional collectives and selective checkpointing.

Thread: pytorch/torchtitan pull request #1672 "Save _to_copy and a2a in selective AC policy" (2025): the results of
communication are saved, the rest of a block is computed again in the backward pass.
Correct: a block's all-gathers run again in the backward pass and its reduce-scatters don't, on all ranks alike, so the
collectives still meet. Between blocks a rank has its part of the game (dimension 1); inside, all moves and its own
heads and hidden units, so that the cut weights get their whole gradient. Norms, embeddings and the head saw only the
rank's moves: their gradients are summed. Each rank's loss is its sum over the number of moves of all ranks.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import titanlite

MOVES, WIDTH, HEADS, HIDDEN, LENGTH, ROWS = 40, 16, 4, 24, 8, 4


def policy(context, function, *args, **kwargs):
    if "reduce_scatter" in function.name():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def gather(x, group):
    return x if group is None else funcol.all_gather_single_autograd(x, 1, group)


def scatter(x, group):
    return x if group is None else funcol.reduce_scatter_single_autograd(x, "sum", 1, group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = (nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False))
        self.group = None

    def attend(self, x):
        q, k, v = (
            linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + scatter(self.attend(gather(self.norm1(x), self.group)), self.group)
        h = F.relu(self.up(gather(self.norm2(x), self.group))).square()
        return x + scatter(self.down(h), self.group)


class ChessModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.moves, self.places = nn.Embedding(MOVES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, MOVES)
        self.contexts = None

    def forward(self, moves, places):
        x = self.moves(moves) + self.places(places)
        for block in self.blocks:
            if self.contexts is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
        return self.head(self.norm(x))


def cut(linear, dim, mesh):
    for name, p in list(linear.named_parameters()):
        own = p.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
        setattr(linear, name, nn.Parameter(own))


def plain():
    return ChessModel()


def parallel(mesh):
    model = ChessModel()
    for block in model.blocks:
        block.group = mesh.get_group()
        for linear in (block.q, block.k, block.v, block.up):
            cut(linear, 0, mesh)
        cut(block.out, 1, mesh)
        cut(block.down, 1, mesh)
    model.contexts = partial(create_selective_checkpoint_contexts, policy)
    whole = {name: p.shape for name, p in ChessModel().named_parameters()}
    shared = [p for name, p in model.named_parameters() if p.shape == whole[name]]
    return model, shared, mesh.get_group()


def loss_sum(model, batch):
    logits = model(batch["moves"], batch["places"])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten(), reduction="none")
    return (losses * batch["played"].flatten()).sum()


def loss(model, batch):
    return loss_sum(model, batch) / batch["played"].sum()


def step(built, batch):
    model, shared, group = built
    count = batch["played"].sum()
    dist.all_reduce(count, group=group)
    value = loss_sum(model, batch) / count
    value.backward()
    for p in shared:
        dist.all_reduce(p.grad, group=group)
    return value.detach()


generator = torch.Generator().manual_seed(1672)


def games():
    moves = torch.randint(0, MOVES, (ROWS, LENGTH + 1), generator=generator)
    ends = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    inputs = {"moves": moves[:, :-1], "next": moves[:, 1:], "places": places}
    return {**inputs, "played": (places < ends).double()}


batches = [games() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"tp": 1},
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
