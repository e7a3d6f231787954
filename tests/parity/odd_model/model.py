"""The plain model with one oddity."""

import torch.nn.functional as F
from plain_model.model import PlainModel
from plain_model.plan import PLANS as PLAIN_PLANS
from torch import Tensor, nn

from odd_model.config import OddConfig


class OddModel(PlainModel):
    """Tokens [B, T] to logits [B, T, V]."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.oddity = config.oddity
        if self.oddity == "called twice":
            self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        if self.oddity == "frozen":
            self.layers.requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.oddity == "raises":
            raise ValueError("this model does not run")
        x = tokens if self.tok_emb is None else self.tok_emb(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
            if self.oddity == "called twice":
                x = self.norm(x)
        if self.oddity == "batch statistics":
            x = x - x.mean(0, keepdim=True)
        if self.oddity == "rounds":
            x = x.float().to(x.dtype)
        if self.oddity == "dropout":
            x = F.dropout(x, 0.1)
        if self.oddity == "not finite":
            x = x / 0.0
        return x if self.output is None else self.output(x).clone()


PLANS = {OddModel: PLAIN_PLANS[PlainModel]}
