"""Fine-tuning a pruned model under FSDP2: the pruning masks are sharded like the weights, in hooks after wrapping.

Thread: https://github.com/pytorch/pytorch/issues/103958 "How to modify gradients of an FSDP model?" (a pruned model
whose zeros have to stay), 2023-06-21.
Right: each sharded weight has a hook that multiplies its reduced gradient with the mask's shard of the same rows.
Must not be accused: gradients that are changed after the reduce-scatter, hooks that differ between the ranks by
their part of the mask, weights that are never updated.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import mse_loss

import titanlite

DIM, HIDDEN = 8, 15


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, DIM), nn.Linear(DIM, 3)
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        with torch.no_grad():
            for layer in self.layers:
                layer.up.weight[layer.up.weight.abs() < 0.15] = 0.0
                layer.down.weight[layer.down.weight.abs() < 0.1] = 0.0

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def pruning_masks(model):
    names = [n for n, _ in model.named_parameters() if ".up.weight" in n or ".down.weight" in n]
    return {n: (model.get_parameter(n).detach() != 0).double() for n in names}


def keep_pruned(parameter, mask):
    def hook(p):
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        grad.mul_(mask)

    parameter.register_post_accumulate_grad_hook(hook)


def pruned_net():
    model = Net()
    for name, mask in pruning_masks(model).items():
        keep_pruned(model.get_parameter(name), mask)
    return model


def parallel(mesh):
    model = Net()
    masks = pruning_masks(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for name, mask in masks.items():
        p = model.get_parameter(name)
        keep_pruned(p, distribute_tensor(mask, p.device_mesh, p.placements).to_local())
    return model


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(103958)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 3, generator=generator)}
    for _ in range(3)
]
arguments = pruned_net, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
