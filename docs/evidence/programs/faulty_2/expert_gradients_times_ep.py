"""torchtitan's experts over the data-parallel ranks: their gradients are ep times those without ep.

Thread: https://github.com/pytorch/pytorch/issues/160285 "Wrong-size gradients in Expert Parallel MoE",
2025-08-10 (doubled with EP=2).
Wrong: the loss is a mean on every rank, and gradients are averaged over the ranks, but for the experts',
which already are sums over all ranks' tokens and would have to be divided by ep.
A right diagnosis says: the gradients of experts.w1 and experts.w2 are 2 times too large, the degree of
ep; all others agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

EXPERTS, DIM, HIDDEN, VOCAB = 4, 16, 24, 20


class GatherTokens(torch.autograd.Function):
    """all-gather; the backward pass reduce-scatters"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return ScatterTokens.apply(grad, ctx.group), None


class ScatterTokens(torch.autograd.Function):
    """reduce-scatter; the backward pass all-gathers"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return GatherTokens.apply(grad, ctx.group), None


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * 0.2)

    def forward(self, x, scores):
        h = silu(torch.einsum("td,edh->teh", x, self.w1))
        return torch.einsum("teh,ehd,te->td", h, self.w2, scores)


class MoE(nn.Module):
    ep_group = None

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), GroupedExperts()

    def forward(self, x):
        scores = self.router(x).sigmoid()
        top = scores.topk(2, -1)
        scores = torch.zeros_like(scores).scatter(-1, top.indices, top.values)
        if self.ep_group is None:
            return self.experts(x, scores)
        n, rank = dist.get_world_size(self.ep_group), dist.get_rank(self.ep_group)
        x, scores = (GatherTokens.apply(t, self.ep_group) for t in (x, scores))
        return ScatterTokens.apply(self.experts(x, scores.chunk(n, -1)[rank]), self.ep_group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.moe, self.output = MoE(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.output(x + self.moe(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"].flatten())


def parallel(mesh):
    model, ep = Model(), mesh["ep"].size()
    model.moe.ep_group = mesh.get_group("ep")
    for p in model.moe.experts.parameters():
        p.data = p.data.chunk(ep)[mesh.get_local_rank("ep")].clone()
        p.is_expert = True
    return model


def train_step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        if not getattr(p, "is_expert", False):
            dist.all_reduce(p.grad, group=model.moe.ep_group)
            p.grad /= dist.get_world_size(model.moe.ep_group)
    return value


generator = torch.Generator().manual_seed(27)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"ep": 2}, split="ep", step=train_step)
    print(titanlite.compare(Model, parallel, **options))
