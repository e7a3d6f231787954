"""How the next token is chosen from a model's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """The distribution from which tokens are sampled.

    Logits are divided by `temperature`; 0 always takes the likeliest token. Then only the `top_k`
    likeliest tokens are kept, and of these the likeliest whose probabilities, before any was
    dropped, first add up to `top_p` (Holtzman et al. 2019, arXiv 1904.09751). Logits from
    `vocab_size` on are padding of the vocabulary and are never sampled.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    vocab_size: int | None = None

    def __call__(self, logits_BV: Tensor, generators: list[torch.Generator]) -> Tensor:
        """The next token of each row, int64 [B, 1]; one random generator per row."""
        logits_BV = self.keep(logits_BV.float())
        if self.temperature == 0:
            return logits_BV.argmax(-1, keepdim=True)
        # Gumbel-max: the noise is drawn on the CPU, so every device samples the same tokens.
        uniform = torch.stack([torch.rand(logits_BV.size(1), generator=g) for g in generators])
        gumbel_BV = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        return (logits_BV + gumbel_BV.to(logits_BV.device)).argmax(-1, keepdim=True)

    def keep(self, logits_BV: Tensor) -> Tensor:
        """The logits at this temperature, -inf for tokens that are not kept."""
        if self.vocab_size is not None and self.vocab_size < logits_BV.size(1):
            logits_BV = logits_BV.clone()
            logits_BV[:, self.vocab_size :] = -torch.inf
        if self.temperature == 0:
            return logits_BV
        logits_BV = logits_BV / self.temperature
        if self.top_k is None and self.top_p == 1:
            return logits_BV
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        probabilities_BV = sorted_BV.softmax(-1)
        # The likeliest token is always kept: nothing comes before it.
        before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
        is_out_BV = before_BV >= self.top_p
        if self.top_k is not None:
            is_out_BV[:, self.top_k :] = True
        sorted_BV = sorted_BV.masked_fill(is_out_BV, -torch.inf)
        return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)
