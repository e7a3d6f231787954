"""Weight decay for matrices only, chosen by p.ndim, on the parameters of a model that FSDP has flattened.

Thread: https://github.com/mlfoundations/open_clip/pull/358 "[WIP] Support FSDP" ("since FSDP flattens everything,
`p.ndim` is always < 2"), 2023-02-18.
Wrong: the parameters are one-dimensional shards, so none of them is in the group with weight decay.
EXPECT: the optimizer's update differs: after step 1 the weights (the matrices, blocks.*.weight and so on) have no
weight decay on the ranks; gradients agree, and biases and norms agree.
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
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(self.norm(x))


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def make_optimizer(parameters):
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.2},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def parallel(mesh):
    model = FullyShardedDataParallel(
        Net(),
        process_group=mesh.get_group("dp"),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return model, make_optimizer(model.parameters())


def step(built, batch):
    model, _ = built
    value = loss(model, batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(358)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 3, generator=generator)}
    for _ in range(3)
]
arguments = Net, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
