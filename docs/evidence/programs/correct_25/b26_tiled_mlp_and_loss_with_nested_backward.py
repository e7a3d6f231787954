"""A long-context model under Ulysses whose MLPs and loss are computed tile by tile with backward passes of their own.

Thread: deepspeedai/DeepSpeed pull request #7422 "TiledMLP + SequenceTiledCompute: improve the bs>1 use-case" (2025),
for Arctic long sequence training: an MLP works on tiles of the flattened tokens, again in the backward pass, and the
logits and their loss exist for one tile at a time.
Correct: the MLP's function keeps only its input; its backward pass runs every tile again and calls the engine inside
the engine, which adds to the gradients of the weights and, as the tile's .grad is a view, writes the gradient of the
input in place. The loss runs its backward passes within its forward pass already, with 1 as the gradient of the loss,
so nothing may scale it afterwards: the tokens are counted over all ranks before, and the gradients are added up by
hand, not averaged.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd

import titanlite

VOCAB, WIDTH, HEADS, LAYERS, ROWS, LENGTH = 37, 16, 4, 2, 2, 24
IGNORE, TILES = -100, 3


def views_of_gradient(x, tiles):
    """Tiles of x as leaves, whose gradients are views of one tensor."""
    x_grad = torch.zeros_like(x)
    leaves = [tile.requires_grad_() for tile in x.detach().chunk(tiles)]
    for leaf, grad in zip(leaves, x_grad.chunk(tiles)):
        leaf.grad = grad
    return leaves, x_grad


class TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mlp, x, tiles):
        ctx.mlp, ctx.tiles = mlp, tiles
        ctx.save_for_backward(x)
        return torch.cat([mlp.one_tile(tile) for tile in x.chunk(tiles)])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        leaves, x_grad = views_of_gradient(x, ctx.tiles)
        for leaf, incoming in zip(leaves, grad.chunk(ctx.tiles)):
            with torch.enable_grad():
                output = ctx.mlp.one_tile(leaf)
            torch.autograd.backward(output, incoming)
        return None, x_grad, None


class TiledLogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss_of_tile, x, targets, tiles):
        leaves, x_grad = views_of_gradient(x, tiles)
        total = x.new_zeros(())
        for leaf, target in zip(leaves, targets.chunk(tiles)):
            with torch.enable_grad():
                value = loss_of_tile(leaf, target)
            torch.autograd.backward(value)
            total += value.detach()
        ctx.save_for_backward(x_grad)
        return total

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.saved_tensors[0] * grad, None, None


def exchange(x, group):
    """The first dimension goes to the ranks, and what comes is stacked along it."""
    return all_to_all_single_autograd(x.contiguous(), None, None, group)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, group):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if group is not None:
            sp = dist.get_world_size(group)
            qkv = exchange(qkv.unflatten(2, (sp, -1)).movedim(2, 0), group)
            qkv = qkv.movedim(0, 3).flatten(3, 4)  # a part of the heads, all places
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        if group is not None:
            y = exchange(y.unflatten(2, (sp, -1)).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def one_tile(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x, tiles):
        if tiles == 1:
            return self.one_tile(x)
        return TiledMLP.apply(self, x.flatten(0, 1), tiles).view_as(x)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mlps = nn.ModuleList(MLP() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, batch, group=None, tiles=1):
        x = self.words(batch["tokens"]) + self.places(batch["position_ids"])
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps)):
            x = x + attention(self.norms[2 * i](x), group)
            x = x + mlp(self.norms[2 * i + 1](x), tiles)
        return self.norms[-1](x)


def summed_loss(model, x, targets):
    return F.cross_entropy(model.head(x), targets, ignore_index=IGNORE, reduction="sum")


def plain():
    return LanguageModel()


def parallel(mesh):
    return LanguageModel(), mesh.get_group("sp")


def loss(model, batch):
    count = (batch["targets"] != IGNORE).sum()
    return summed_loss(model, model(batch).flatten(0, 1), batch["targets"].flatten()) / count


def step(built, part):
    model, group = built
    count = (part["targets"] != IGNORE).sum()
    dist.all_reduce(count, group=group)
    hidden, targets = model(part, group, TILES).flatten(0, 1), part["targets"].flatten()

    def loss_of_tile(x, y):
        return summed_loss(model, x, y) / count

    value = TiledLogitsLoss.apply(loss_of_tile, hidden, targets, 4)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    value = value.detach()
    dist.all_reduce(value, group=group)
    return value


generator = torch.Generator().manual_seed(7422)


def documents():
    words = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    targets = words[:, 1:].clone()
    targets[0, : int(torch.randint(3, 20, (), generator=generator))] = IGNORE  # the prompt
    places = torch.arange(LENGTH).expand(ROWS, -1)
    return {"tokens": words[:, :-1], "targets": targets, "position_ids": places}


batches = [documents() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split={"sp": 1}, ranks={"sp": 4})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
