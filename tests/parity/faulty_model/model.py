"""Blocks with a gate, a fused layer and biases; a token sees those before it by their mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faulty_model.config import FaultyConfig


class FaultyModel(nn.Module):
    def __init__(self, config: FaultyConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tok_emb(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        return self.output(x).clone()

    def init_parameter(self, name: str, parameter: Tensor, generator) -> None:
        parameter.normal_(0.0, 0.3, generator=generator)


class Block(nn.Module):
    def __init__(self, config: FaultyConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, config.hidden_dim)
        self.gate = nn.Linear(config.dim, config.hidden_dim)
        self.down = nn.Linear(config.hidden_dim, config.dim)
        self.scale = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        seen = x.cumsum(1) / (positions + 1)[None, :, None]
        y = self.norm(x + seen)
        return x + self.reduce(self.down(F.gelu(self.up(y)) * self.gate(y))) + self.scale(y)

    def reduce(self, y: Tensor) -> Tensor:
        return y


class Copy(torch.autograd.Function):
    """Megatron's f: the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Megatron's g: the output is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
