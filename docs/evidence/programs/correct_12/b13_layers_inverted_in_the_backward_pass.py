"""Reversible layers under FSDP2 that keep no activations: the backward pass computes them from the outputs, layer by layer.

Thread: of the kind pyg-team/pytorch_geometric pull request #4671 "`RevGNN` implementation" (2022); the shards without a row are
those of pytorch/pytorch issue #137342 "Allow sharding for a tensor for FSDP-2 on arbitrary dim instead of 0" (2024).
Correct: each layer is a pair of additive couplings, so its inputs are its outputs less what it added; the modules run once more,
in reverse order, inside of the backward pass. Only the root is sharded, so the parameters are whole until it ends. The head has
two rows for three ranks: the third has an empty shard.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu

import titanlite

INPUTS, HALF, CLASSES = 7, 5, 2


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HALF), nn.Linear(HALF, 10), nn.Linear(10, HALF)

    def forward(self, x):
        return self.down(gelu(self.up(self.norm(x))))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = Branch(), Branch()


def run(layers, left, right):
    for layer in layers:
        left = left + layer.f(right)
        right = right + layer.g(left)
    return left, right


class Inverted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, left, right):
        ctx.layers = layers
        left, right = run(layers, left, right)
        ctx.save_for_backward(left, right)
        return left, right

    @staticmethod
    def backward(ctx, d_left, d_right):
        left, right = (x.detach() for x in ctx.saved_tensors)
        for layer in reversed(ctx.layers):
            right, d_left = undo(layer.g, left, right, d_left, d_right)
            left, d_right = undo(layer.f, right, left, d_right, d_left)
        return None, d_left, d_right


def undo(branch, source, target, d_source, d_target):
    """What the target was before the branch of source was added to it, and the source's gradient."""
    with torch.enable_grad():
        leaf = source.detach().requires_grad_()
        added = branch(leaf)
    added.backward(d_target)
    return target - added.detach(), d_source + leaf.grad


class Network(nn.Module):
    keep_activations = True

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(INPUTS, 2 * HALF), nn.Linear(2 * HALF, CLASSES)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        halves = self.stem(x).chunk(2, -1)
        halves = (
            run(self.layers, *halves)
            if self.keep_activations
            else Inverted.apply(self.layers, *halves)
        )
        return self.head(torch.cat(halves, -1))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["label"])


def parallel(mesh):
    model = Network()
    model.keep_activations = False
    return fully_shard(model, mesh=mesh["dp"])


rng = torch.Generator().manual_seed(508)
batches = [
    {
        "x": torch.randn(12, INPUTS, generator=rng),
        "label": torch.randint(CLASSES, (12,), generator=rng),
    }
    for _ in range(3)
]
arguments = Network, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 3}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
