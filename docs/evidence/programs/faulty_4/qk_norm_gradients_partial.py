"""Tensor parallel attention with q and k norms: each rank norms its own heads with replicated weights.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/816 "[QUESTION] How does tensor_parallel coop with
q/k_layernorm" (how to keep them consistent), 2024-05-10.
Wrong: the weights of q_layernorm and k_layernorm are used by the heads of every rank, but their gradients,
each of the rank's own heads, are not summed over tp.
EXPECT: the gradients of the q_layernorm and k_layernorm parameters are partial sums: they are never summed
over tp. All other gradients of step 1 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, HEADS, HEAD_DIM = 12, 4, 6


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


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SelfAttention(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, inner = group, HEADS * HEAD_DIM // (group.size() if group else 1)
        self.linear_q, self.linear_k = nn.Linear(DIM, inner), nn.Linear(DIM, inner)
        self.linear_v = nn.Linear(DIM, inner)
        self.linear_proj = nn.Linear(inner, DIM, bias=False)
        self.q_layernorm, self.k_layernorm = nn.LayerNorm(HEAD_DIM), nn.LayerNorm(HEAD_DIM)

    def heads(self, x):
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def forward(self, x):
        if self.group is not None:
            x = Copy.apply(x, self.group)
        q, k = self.q_layernorm(self.heads(self.linear_q(x))), self.heads(self.linear_k(x))
        k, v = self.k_layernorm(k), self.heads(self.linear_v(x))
        out = (q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v
        out = self.linear_proj(out.transpose(1, 2).flatten(2))
        return out if self.group is None else Reduce.apply(out, self.group)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.layers = nn.ModuleList(SelfAttention() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.outputs(x)


def shard(name):
    if any(word in name for word in ("linear_q", "linear_k", "linear_v")):
        return 0, "tp"
    return (1, "tp") if "linear_proj" in name else None


def parallel(mesh):
    model, group = Transformer(), mesh.get_group("tp")
    for i, whole in enumerate(model.layers):
        part = SelfAttention(group)
        for name, p in part.named_parameters():
            p.data, cut = whole.get_parameter(name).data, shard(name)
            if cut:
                p.data = p.data.chunk(group.size(), cut[0])[group.rank()].clone()
        model.layers[i] = part
    return model


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(816)
batches = [{n: torch.randn(2, 6, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Transformer, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
