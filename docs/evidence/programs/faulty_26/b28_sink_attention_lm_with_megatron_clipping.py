"""A language model with learned attention sinks, as gpt-oss, on tensor ranks with Megatron's clipping of gradients.

Thread: NVIDIA/Megatron-LM pull request #7530 "fix(core): mark learnable softmax_offset as tensor parallel for clip
norm" (2026), for finding 8 of issue #7452: the sinks, sized by the local heads, aren't marked tensor_model_parallel.
Fault: Attention.__init__ makes softmax_offset without the mark that the linear layers get from tensor_parallel, so
clip takes it for a replica and counts it on tensor rank 0 only: the sinks of rank 1's heads are left out.
REPAIR: `self.softmax_offset = nn.Parameter(sinks)` -> `self.softmax_offset = tensor_parallel(nn.Parameter(sinks))`
A right first sentence says: the gradient norm that clip returns is too small, because the part of softmax_offset (the
sinks) that the second tensor rank holds is not counted in it; the gradients before the clipping are right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, HIDDEN, HEAD, FFN, LAYERS, ROWS, LENGTH, MAX_NORM = 17, 16, 4, 24, 2, 4, 8, 0.5


def all_reduced(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class _TensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, leaving):
        ctx.group, ctx.leaving = group, leaving
        return all_reduced(x, group) if leaving else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.leaving else all_reduced(grad, ctx.group), None, None


def region(x, group, leaving=False):
    return _TensorRegion.apply(x, group, leaving) if group else x


def tensor_parallel(parameter):
    parameter.tensor_model_parallel = True
    return parameter


def parallel_linear(inputs, outputs):
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(tensor_parallel(linear.weight), std=0.6)
    return linear


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, inner = group, HIDDEN // (group.size() if group else 1)
        self.q, self.k, self.v = (parallel_linear(HIDDEN, inner) for _ in range(3))
        self.out = parallel_linear(inner, HIDDEN)
        sinks = torch.linspace(0.0, 3.0, inner // HEAD)
        self.softmax_offset = nn.Parameter(sinks)

    def forward(self, x):
        x = region(x, self.group)
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / HEAD**0.5
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
        sinks = self.softmax_offset.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        x = self.out((weights @ v).transpose(1, 2).flatten(2))
        return region(x, self.group, leaving=True)


class Mlp(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, inner = group, FFN // (group.size() if group else 1)
        self.gate, self.up = parallel_linear(HIDDEN, inner), parallel_linear(HIDDEN, inner)
        self.down = parallel_linear(inner, HIDDEN)

    def forward(self, x):
        x = region(x, self.group)
        x = self.down(F.silu(self.gate(x)) * self.up(x))
        return region(x, self.group, leaving=True)


class SinkLM(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, self.words = group, nn.Embedding(VOCAB, HIDDEN)
        self.attentions = nn.ModuleList(Attention(group) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(Mlp(group) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for attention, mlp in zip(self.attentions, self.mlps):
            x = x + attention(F.rms_norm(x, (HIDDEN,)))
            x = x + mlp(F.rms_norm(x, (HIDDEN,)))
        return self.head(self.norm(x))


def clip(model):
    """Parameters that all tensor ranks hold are counted on the first of them."""
    total, first = torch.zeros(()), model.group is None or model.group.rank() == 0
    for parameter in model.parameters():
        if getattr(parameter, "tensor_model_parallel", False) or first:
            total += parameter.grad.square().sum()
    norm = (all_reduced(total, model.group) if model.group else total).sqrt()
    for parameter in model.parameters():
        parameter.grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    return norm


plain = SinkLM


def shard(name):  # noqa: RET503
    if name.startswith(("attentions", "mlps")):
        return 1 if name.endswith(("out.weight", "down.weight")) else 0, "tp"


def parallel(mesh):
    group, state = mesh.get_group("tp"), plain().state_dict()
    for name in filter(shard, state):
        state[name] = state[name].chunk(group.size(), shard(name)[0])[group.rank()]
    model = SinkLM(group)
    model.load_state_dict(state)
    return model


def loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


generator = torch.Generator().manual_seed(7530)
batches = [torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard, clip=clip)
options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
