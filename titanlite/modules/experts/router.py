"""The router: scores every expert for a token, chooses the best, and weights their outputs.

It computes in float32, or in the model's dtype if that is wider. Experts with equal scores are
chosen in the order of their numbers, so the choice does not depend on the kernel.

Shapes: T tokens, B sequences, D model width, E experts, K experts per token.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ScoreFunction = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The routing of tokens: `weights` and `chosen` are [T, B, K], `scores` is [T, B, E].

    `weights` are the factors on the outputs of the experts `chosen` (int64), best first.
    """

    weights: Tensor
    chosen: Tensor
    scores: Tensor


class Gate(nn.Linear):
    """A linear layer without bias that multiplies in at least float32.

    A class of its own, so that conversions of linear layers to float8 skip it.
    """

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., D] @ weight.T -> [..., E] in at least float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(dtype), weight.to(dtype))


class Router(nn.Module):
    """Chooses `top_k` experts for each token by the scores of its gate.

    `normalize` divides a token's weights by their sum, and `scale` multiplies them.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score_func: ScoreFunction = "sigmoid",
        normalize: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.gate = Gate(dim, num_experts)
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.normalize, self.scale = score_func, normalize, scale
        self.choose: Callable[[Tensor], Tensor] | None = None
        """If set, maps the experts chosen by score, [T, B, K], to those that are used instead."""

    def forward(
        self, x_TBD: Tensor, bias_E: Tensor | None = None, slots_TBK: Tensor | None = None
    ) -> Routing:
        """Route tokens. `bias_E` is added to the scores for the choice, and not to the weights.

        With `slots_TBK` (int64) the choice ignores the scores: a slot goes to the expert
        `slot % E`.
        """
        logits = self.gate(x_TBD)
        scores = logits.softmax(-1) if self.score_func == "softmax" else logits.sigmoid()
        if slots_TBK is not None:
            chosen = slots_TBK % self.num_experts
        else:
            ranked = scores.detach() if bias_E is None else scores.detach() + bias_E
            # torch.topk leaves the order of equal values open.
            chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        if self.choose is not None:
            chosen = self.choose(chosen)
        weights = scores.gather(-1, chosen)
        if self.normalize:
            # The same constant as DeepSeek-V3's, for scores that are all zero.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(weights * self.scale, chosen, scores)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, score_func={self.score_func}"
