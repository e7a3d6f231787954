"""Expert parallelism whose map places experts round robin, while the weights are cut in contiguous blocks.

Thread: https://github.com/vllm-project/vllm/pull/23745 "[Feat][EPLB] A novel static EPLB placement strategy for MoE
models.", comment of 2025-09-05 (the weight loader is unchanged: the weights of experts 0 to 3 are on rank 0, but the
map says 0, 4, 8 and 12).
Wrong: rank 0 has the weights of experts 0 and 1 and takes the tokens of 0 and 2. So the tokens of expert 1 go through
the weights of expert 2, and the other way round.
EXPECT: in the forward pass, the output of layers.0.experts is the first that differs: the tokens routed to experts 1
and 2 are computed with each other's weights (the router agrees). The map from experts to ranks (round robin) does not
fit the weights (contiguous).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HIDDEN, EXPERTS, TOP_K = 12, 8, 12, 4, 2


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


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def determine_expert_map(ep_size, ep_rank):
    expert_map = torch.full((EXPERTS,), -1)
    own = range(ep_rank, EXPERTS, ep_size)
    expert_map[list(own)] = torch.arange(len(own))
    return expert_map


class Experts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)
        self.expert_map = determine_expert_map(1, 0)

    def forward(self, x, weights, chosen):
        if self.group is not None:
            x, weights = Copy.apply(x, self.group), Copy.apply(weights, self.group)
        out = torch.zeros_like(x)
        for k in range(TOP_K):
            local = self.expert_map[chosen[:, k]]
            for i in range(len(self.w1)):
                rows = (local == i).nonzero().squeeze(1)
                h = torch.relu(x[rows] @ self.w1[i]) @ self.w2[i]
                out = out.index_add(0, rows, h * weights[rows, k, None])
        return out if self.group is None else Sum.apply(out, self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(TOP_K)
        return x + self.experts(h, weights / weights.sum(-1, keepdim=True), chosen)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(name):
    return (0, "ep") if ".experts." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("ep")
    for layer in model.layers:
        experts = layer.experts
        experts.group = group
        experts.expert_map = determine_expert_map(group.size(), group.rank())
        for p in experts.parameters():
            p.data = p.data.chunk(group.size())[group.rank()].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"].flatten())


generator = torch.Generator().manual_seed(23745)
batches = [
    {n: torch.randint(VOCAB, (4, 8), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
