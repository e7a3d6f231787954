"""Pruning under FSDP: after each step the pruned weights are set to zero in summoned parameters.

Thread: https://github.com/pytorch/pytorch/issues/107081 "[FSDP] summon_full_params won't change parameters",
2023-08-12.
Right: the parameters are summoned with writeback.
Must not be accused: a hook after the optimizer that changes the weights, on both sides.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import mse_loss

import titanlite


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        with torch.no_grad():
            for block in self.blocks:
                block.weight[block.weight.abs() < 0.1] = 0.0

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def pruning_sgd(parameters):
    parameters = list(parameters)
    masks = [(p == 0) & (p.ndim == 2) for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def prune(*_):
        for p, mask in zip(parameters, masks):
            p.data.masked_fill_(mask, 0.0)

    optimizer.register_step_post_hook(prune)
    return optimizer


def parallel(mesh):
    net = Net()
    masks = {n: (p == 0) & (p.ndim == 2) for n, p in net.named_parameters()}
    model = FullyShardedDataParallel(
        net, process_group=mesh.get_group("dp"), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def prune(*_):
        with FullyShardedDataParallel.summon_full_params(model, writeback=True):
            for name, p in model.module.named_parameters():
                p.data.masked_fill_(masks[name], 0.0)

    optimizer.register_step_post_hook(prune)
    return model, optimizer


def step(built, batch):
    model, _ = built
    value = loss(model, batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(107081)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 3, generator=generator)}
    for _ in range(3)
]
arguments = Net, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
options["optimizer"] = pruning_sgd

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
