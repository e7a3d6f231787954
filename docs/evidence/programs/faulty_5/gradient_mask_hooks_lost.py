"""Fine-tuning a pruned model under FSDP2: the hooks that mask the gradients belong to the parameters before wrapping.

Thread: https://github.com/pytorch/pytorch/issues/103958 "How to modify gradients of an FSDP model?" (hooks on
torch.nn.Linear.weight that multiply the gradient with the pruning mask), 2023-06-21.
Wrong: fully_shard replaces each parameter with a sharded one, on which no hook is registered. The pruned weights get
a gradient and grow, and nothing complains.
EXPECT: the gradients of the pruned weights (layers.*.up.weight, layers.*.down.weight) differ on the ranks: elements
that are zero on one process, by a hook on the parameter (the pruning mask), are not zero; the other elements agree.
The hooks were registered before fully_shard and are lost. Loss of step 1 agrees.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import titanlite

DIM, HIDDEN = 8, 16


def prune(linear, amount):
    weight = linear.weight
    threshold = weight.detach().abs().flatten().quantile(amount)
    mask = (weight.detach().abs() > threshold).to(weight.dtype)
    with torch.no_grad():
        weight.mul_(mask)
    weight.register_hook(lambda grad: grad * mask)


class PrunedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        prune(self.up, 0.4)
        prune(self.down, 0.4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class PrunedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, DIM), nn.Linear(DIM, 3)
        self.layers = nn.ModuleList(PrunedMlp() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = PrunedNet()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


generator = torch.Generator().manual_seed(103958)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 3, generator=generator)}
    for _ in range(3)
]
arguments = PrunedNet, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
