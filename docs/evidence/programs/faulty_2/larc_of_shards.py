"""LARC under FSDP with the norms of the rank's shards.

Thread: https://github.com/facebookresearch/fairscale/issues/696 "Add store weight/grad norm option"
(norms of whole weights and gradients for LARC), 2021-05-25.
Wrong: the trust ratio is |w| / |g| of the local shard, so each shard of a matrix has its own.
A right diagnosis says: gradients agree; the optimizer's update is wrong: every rank's shard has its
own factor, since the norms are taken over the shard, not over the whole parameter (sum over dp).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import titanlite


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LARC(torch.optim.Optimizer):
    def __init__(self, params, lr=0.5, trust_coefficient=0.02, weight_decay=1e-4):
        super().__init__(params, dict(lr=lr, trust=trust_coefficient, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                weight, grad = local(p), local(p.grad)
                param_norm, grad_norm = weight.norm(), grad.norm()
                decay = group["weight_decay"]
                if param_norm > 0 and grad_norm > 0:
                    ratio = group["trust"] * param_norm / (grad_norm + decay * param_norm)
                    grad = (grad + decay * weight) * ratio
                weight.sub_(grad, alpha=group["lr"])


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(14, 20)
        self.stages = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.fc = nn.Linear(20, 6)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for stage in self.stages:
            x = x + torch.relu(stage(x))
        return self.fc(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Trunk()
    for stage in model.stages:
        fully_shard(stage, mesh=mesh)
    return fully_shard(model, mesh=mesh)


generator = torch.Generator().manual_seed(69)
batches = [
    {"x": torch.randn(8, 14, generator=generator), "y": torch.randint(6, (8,), generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", optimizer=LARC)
    print(titanlite.compare(Trunk, parallel, **options))
