"""Experts cut over ranks whose router marks the experts of other ranks with 0, the number of a local expert.

Thread: https://github.com/huggingface/transformers/pull/40545 "Fix gpt-oss router_indices in EP" (the indices have
been masked by 0, but the 0 will be recognized as experts[0]), 2025-08-29.
Wrong: a token whose expert lives elsewhere goes through the first local expert of this rank too, with the gate of the
expert that it was meant for.
EXPECT: in the forward pass, the output of layers.0.experts is the first that differs (its router agrees): indices of
experts on other ranks are masked with 0, so each rank's first local expert (global 0 and 3) also processes the tokens
of the other rank's experts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import titanlite

VOCAB, DIM, HIDDEN, EXPERTS, TOP_K = 12, 8, 10, 6, 2


class EnterEp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class LeaveEp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class TopKRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, EXPERTS)

    def forward(self, x):
        values, indices = self.linear(x).topk(TOP_K)
        return values.softmax(-1), indices


class GptOssExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.ep_group, self.first, self.num_experts = None, 0, EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * HIDDEN) * 0.4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * 0.4)
        self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, DIM) * 0.4)

    def local_indices(self, indices):
        local = indices - self.first
        return local.masked_fill((local < 0) | (local >= self.num_experts), 0)

    def forward(self, x, scores, indices):
        if self.ep_group is not None:
            x, scores = EnterEp.apply(x, self.ep_group), EnterEp.apply(scores, self.ep_group)
        mask = one_hot(self.local_indices(indices), self.num_experts + 1)
        out = torch.zeros_like(x)
        for i in range(self.num_experts):
            token, slot = mask[..., i].nonzero(as_tuple=True)
            gate, up = (x[token] @ self.gate_up_proj[i]).chunk(2, -1)
            h = (gate * torch.sigmoid(1.702 * gate) * up) @ self.down_proj[i]
            h = h + self.down_proj_bias[i]
            out = out.index_add(0, token, h * scores[token, slot, None])
        return out if self.ep_group is None else LeaveEp.apply(out, self.ep_group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router, self.experts = nn.RMSNorm(DIM), TopKRouter(), GptOssExperts()

    def forward(self, x):
        h = self.norm(x)
        return x + self.experts(h, *self.router(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.unembedding = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.unembedding(self.norm(x))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"].flatten())


def shard(name):
    return (0, "ep") if ".experts." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("ep")
    for layer in model.layers:
        experts = layer.experts
        experts.ep_group, experts.num_experts = group, EXPERTS // group.size()
        experts.first = group.rank() * experts.num_experts
        for p in experts.parameters():
            p.data = p.data[experts.first :][: experts.num_experts].clone()
    return model


generator = torch.Generator().manual_seed(40545)
batches = [
    {n: torch.randint(VOCAB, (3, 8), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
