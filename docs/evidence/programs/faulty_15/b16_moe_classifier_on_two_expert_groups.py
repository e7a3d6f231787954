"""A mixture of experts on four ranks: two groups of expert-parallel ranks, each with all experts, over data parallel ranks.

Thread: NVIDIA/Megatron-LM pull request #5956 "Divide expert gradients by the expert-parallel size" (2026): the gradient of an
expert already sums the tokens of ep_size ranks, but the average over the expert-data-parallel ranks divides by their number only.
Fault: reduce_gradients divides the experts' gradients by the size of the group that all-reduces them, 2, though tokens of all
4 ranks are in them, each rank's loss being the mean over its own rows; the experts' gradients are twice too large.
REPAIR: `p.grad /= dist.get_world_size(group)` -> `p.grad /= dist.get_world_size()`
A right first sentence says: the gradients of the experts are too large by the expert-parallel degree (2), because they're divided
by the size of the expert-data-parallel group and not by the number of all data parallel ranks whose tokens they sum.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

FEATURES, WIDTH, HIDDEN, EXPERTS, TOP, CLASSES = 6, 10, 14, 4, 2, 5


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty(sum(receive), x.size(1))
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), grad.size(1))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    """Runs rows that are sorted by expert."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, rows, counts):
        parts = rows.split(counts)
        return torch.cat([F.gelu(x @ a) @ b for x, a, b in zip(parts, self.w1, self.w2)])


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def run(self, rows, counts):
        return self.experts(rows, counts.tolist())

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // TOP
        out = self.run(x[token], chosen.flatten().bincount(minlength=EXPERTS))
        return torch.zeros_like(x).index_add(0, token, out * weights.flatten()[order, None])


class ExpertParallelMoE(MoE):
    def run(self, rows, counts):
        size = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        send = counts.view(size, -1).sum(1).tolist()
        receive = theirs.view(size, -1).sum(1).tolist()
        rows = AllToAll.apply(rows, send, receive, self.group)

        local = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(theirs)
        order = local.argsort(stable=True)
        out = self.experts(rows[order], theirs.view(size, -1).sum(0).tolist())
        return AllToAll.apply(out[order.argsort()], receive, send, self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), MoE()

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def reduce_gradients(model, mesh):
    for name, p in model.named_parameters():
        group = mesh.get_group("edp") if ".experts." in name else dist.group.WORLD
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def plain():
    return Net()


def parallel(mesh):
    model = Net()
    rank, size = mesh.get_local_rank("ep"), mesh["ep"].size()
    for layer in model.layers:
        layer.moe.__class__, layer.moe.group = ExpertParallelMoE, mesh.get_group("ep")
        for p in layer.moe.experts.parameters():
            p.data = p.data.chunk(size)[rank].clone()
    return model, mesh


def shard(name):
    return (0, "ep") if ".experts." in name else None


def split(batch, mesh):
    return tuple(tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in batch)


def loss(model, batch):
    x, labels = batch
    return F.cross_entropy(model(x), labels)


def step(built, batch):
    model, mesh = built
    value = loss(model, batch)
    value.backward()
    reduce_gradients(model, mesh)
    return value.detach()


generator = torch.Generator().manual_seed(5956)
batches = [
    (
        torch.randn(24, FEATURES, generator=generator, dtype=torch.float64),
        torch.randint(0, CLASSES, (24,), generator=generator),
    )
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    shard=shard,
    ranks={"edp": 2, "ep": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
