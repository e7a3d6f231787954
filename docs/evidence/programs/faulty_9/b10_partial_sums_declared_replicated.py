"""Tensor parallelism with DTensors around local products: the partial sums of the second product are said to be whole.

Thread: of the kind pytorch/pytorch pull request #115967 "[DTensor] Make DTensor from_local backward partial() to
replicate() pass through" (2023), about local tensors that are declared Partial by hand, and pytorch/pytorch issue #163193
"Incorrect results when adding partial DTensor with a scalar" (2025).
Fault: in ShardedMlp.forward, the local product of the second layer, a partial sum, is wrapped as Replicate, so
redistribute has nothing to do, and each rank goes on with its own summand.
REPAIR: `DTensor.from_local(y, self.mesh, [Replicate()])` -> `DTensor.from_local(y, self.mesh, [Partial()])`
Expected: in the forward pass, the output of blocks.0.mlp is the first that differs, and the ranks have different values:
it is a partial sum over tp that is not all-reduced, since it is declared Replicate instead of Partial. Declare it
Partial, so that redistribute reduces it.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

VOCAB, DIM, HIDDEN = 12, 8, 16


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class ShardedMlp(nn.Module):
    """Mlp with its hidden features cut over the mesh; the weights are DTensors, the products are local."""

    def __init__(self, whole, mesh):
        super().__init__()
        self.mesh, self.up, self.down = mesh, whole.up, whole.down
        for layer, dim in ((self.up, 0), (self.down, 1)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(dim)]))

    def forward(self, x):
        x = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        hidden = gelu(linear(x, self.up.weight.to_local()))
        y = linear(hidden, self.down.weight.to_local())
        y = DTensor.from_local(y, self.mesh, [Replicate()])
        return y.redistribute(placements=[Replicate()]).to_local()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), Mlp()

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        block.mlp = ShardedMlp(block.mlp, mesh["tp"])
    return model


generator = torch.Generator().manual_seed(205)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
