"""A model in plain PyTorch whose embeddings go straight into its blocks."""

import torch.nn.functional as F
from torch import Tensor, nn

from plain_model.config import PlainConfig


class PlainModel(nn.Module):
    """Tokens [B, T] to logits [B, T, V]; a token sees those before it by their mean."""

    def __init__(self, config: PlainConfig) -> None:
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
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.3, generator=generator)


class Block(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        seen = x.cumsum(1) / (positions + 1)[None, :, None]
        return x + self.w2(F.gelu(self.w1(self.norm(x + seen))))
