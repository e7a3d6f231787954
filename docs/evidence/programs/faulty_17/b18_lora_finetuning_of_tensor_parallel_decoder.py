"""LoRA finetuning of a decoder whose frozen linear layers are tensor parallel, on two data parallel replicas.

Thread: NVIDIA/Megatron-LM issue #670 "Why write a special LinearWithFrozenWeight?" (2024): the variant of the linear layer for
frozen weights "looks like a performance optimization, but turns out this could cause different results".
Fault: LinearWithFrozenWeight.backward, which column-parallel layers use for weights without a gradient, returns the
input gradient of the rank's own outputs; the all-reduce that LinearWithGrad does in its backward pass is missing.
REPAIR: `return grad_output @ ctx.weight, None, None` -> `return all_reduced(grad_output @ ctx.weight, ctx.group), None, None`
A right first sentence says: the backward pass of the column-parallel linear with a frozen weight does not all-reduce the input
gradient over the tensor parallel ranks, so all LoRA gradients below such a layer are partial and differ between the ranks.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, INNER, LENGTH, RANK, ALPHA = 21, 16, 4, 32, 9, 4, 8


def all_reduced(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class LinearWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        grad_input = all_reduced(grad_output @ weight, ctx.group)
        return grad_input, grad_output.flatten(0, -2).T @ x.flatten(0, -2), None


class LinearWithFrozenWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.weight, ctx.group = weight, group
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output @ ctx.weight, None, None


class ReduceOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Linear(nn.Module):
    """A bias-free linear layer: whole, or split by rows of the weight ("column") or by its columns ("row")."""

    mode, group = None, None

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def split(self, mode, group):
        dim = 0 if mode == "column" else 1
        self.mode, self.group = mode, group
        own = self.weight.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
        self.weight = nn.Parameter(own.clone(), self.weight.requires_grad)

    def forward(self, x):
        if self.mode == "column":
            function = LinearWithGrad if self.weight.requires_grad else LinearWithFrozenWeight
            return function.apply(x, self.weight, self.group)
        y = F.linear(x, self.weight)
        return y if self.mode is None else ReduceOutput.apply(y, self.group)


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        outputs, inputs = base.weight.shape
        self.base, self.lora_a, self.lora_b = base, Linear(inputs, RANK), Linear(RANK, outputs)
        nn.init.normal_(self.lora_b.weight, std=0.02)

    def split(self, mode, group):
        self.base.split(mode, group)
        self.lora_b.split(mode, group)

    def forward(self, x):
        return self.base(x) + ALPHA / RANK * self.lora_b(self.lora_a(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = (
            Linear(WIDTH, INNER),
            Linear(WIDTH, INNER),
            Linear(INNER, WIDTH),
        )
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x):
        y = self.input_norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.post_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, adapted=("q", "v")):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(3))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), Linear(WIDTH, VOCAB)
        self.requires_grad_(False)
        for layer in self.layers:
            for name in adapted:
                setattr(layer, name, LoraLinear(getattr(layer, name)))

    def tensor_parallel(self, group):
        for layer in self.layers:
            for name in ("q", "k", "v", "gate", "up"):
                getattr(layer, name).split("column", group)
            for name in ("o", "down"):
                getattr(layer, name).split("row", group)
        return self

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def plain():
    return Decoder()


def parallel(mesh):
    return Decoder().tensor_parallel(mesh.get_group("tp")), mesh.get_group("dp")


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def step(built, batch):
    model, dp = built
    value = loss(model, batch)
    value.backward()
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.grad = all_reduced(parameter.grad, dp) / dist.get_world_size(dp)
    return all_reduced(value.detach(), dp) / dist.get_world_size(dp)


generator = torch.Generator().manual_seed(670)
batches = [torch.randint(0, VOCAB, (4, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2, "tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(
        [p for p in parameters if p.requires_grad], lr=5e-3
    ),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
