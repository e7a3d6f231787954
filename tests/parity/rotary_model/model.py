"""A transformer in the form of Llama: batch first, rotary positions in every block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotary_model.config import RotaryConfig


class RotaryModel(nn.Module):
    """Tokens [B, T] to logits [B, T, V]; positions [T] or [B, T], 0 to T-1 unless given."""

    tok_emb: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: nn.Linear | None

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)
        x = tokens if self.tok_emb is None else self.tok_emb(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.output is None else self.output(x).clone()

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.3, generator=generator)


class SequenceParallelRotaryModel(RotaryModel):
    """The same, cut with sequence parallelism."""


class Block(nn.Module):
    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.inner = CausalAttention()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        o = self.inner(rotate(q, positions), rotate(k, positions), v)
        return self.wo(o.transpose(1, 2).flatten(2))


class CausalAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class FeedForward(nn.Module):
    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of heads [B, H, T, E] at positions [T] or [B, T]."""
    half = x.size(-1) // 2
    frequencies = 100.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = positions.to(x.dtype)[..., None] * frequencies
    if angles.ndim == 3:
        angles = angles[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
