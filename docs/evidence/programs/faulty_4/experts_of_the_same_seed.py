"""Expert parallelism: every rank draws its own experts, from the same seed.

Thread: https://github.com/laekov/fastmoe/pull/4 "Init expert" ("each worker shared the same seed, which leads to
exactly the same random initialization among experts"), 2021-02-20.
Wrong: rank 1 has copies of the experts of rank 0.
EXPECT: the starting values of the experts of rank 1 (experts 2 and 3: the second half of experts.up and
experts.down) are wrong: they equal those of rank 0 (experts 0 and 1).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, HIDDEN, EXPERTS = 8, 12, 4


class Exchange(torch.autograd.Function):
    """the sum over the experts of all ranks"""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Experts(nn.Module):
    def __init__(self, num_experts, group=None, seed=7):
        super().__init__()
        self.group, generator = group, torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.empty(num_experts, DIM, HIDDEN))
        self.down = nn.Parameter(torch.empty(num_experts, HIDDEN, DIM))
        with torch.no_grad():
            for i in range(num_experts):
                self.up[i].normal_(0, 0.3, generator=generator)
                self.down[i].normal_(0, 0.3, generator=generator)

    def forward(self, x, gates):
        if self.group is not None:
            x, gates = Copy.apply(x, self.group), Copy.apply(gates, self.group)
            gates = gates.chunk(self.group.size(), -1)[self.group.rank()]
        h = torch.relu(torch.einsum("td,edh->teh", x, self.up))
        out = torch.einsum("teh,ehd,te->td", h, self.down, gates)
        return out if self.group is None else Exchange.apply(out, self.group)


class MoE(nn.Module):
    def __init__(self, num_experts=EXPERTS, group=None):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.gate, self.norm = nn.Linear(DIM, EXPERTS), nn.LayerNorm(DIM)
        self.experts = Experts(num_experts, group)

    def forward(self, x):
        x = self.inputs(x)
        h = self.norm(x)
        gates = self.gate(h).softmax(-1)
        values, chosen = gates.topk(2, -1)
        gates = torch.zeros_like(gates).scatter(-1, chosen, values)
        return self.outputs(x + self.experts(h, gates))


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    group = mesh.get_group("ep")
    return MoE(EXPERTS // group.size(), group)


generator = torch.Generator().manual_seed(4)
batches = [{n: torch.randn(10, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = MoE, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
