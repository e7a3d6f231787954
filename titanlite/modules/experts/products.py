"""The SwiGLU of every expert on its own tokens: one expert after another, or grouped products.

torch._grouped_mm multiplies all experts' tokens in one call. It has no float64, and needs rows that
are multiples of 16 bytes. On CPU it is slower than the loop in float32, and faster in bfloat16.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Bytes: torch._grouped_mm refuses operands whose strides are no multiple of it.
ALIGNMENT = 16


def swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    sizes: Sequence[int],
    *,
    grouped: bool | None = None,
) -> Tensor:
    """w2 (silu(w1 x) * w3 x) for each row of x [N, D], with the weights of the row's expert.

    w1 and w3 are [E, H, D], w2 is [E, D, H]. Rows are sorted by expert; `sizes` are the rows of
    each expert, and add up to N. `grouped` chooses grouped products or a loop over experts; by
    default the faster one for these operands.
    """
    if grouped is None:
        grouped = prefers_grouped(x, w1)
    if not grouped:
        parts = [
            F.linear(F.silu(F.linear(rows, up)) * F.linear(rows, gate), down)
            for rows, up, down, gate in zip(
                x.split(list(sizes)), w1.unbind(), w2.unbind(), w3.unbind(), strict=True
            )
        ]
        return torch.cat(parts)
    ends = torch.tensor(list(sizes), device=x.device).cumsum(0).to(torch.int32)
    h = F.silu(_grouped(x, w1, ends)) * _grouped(x, w3, ends)
    return _grouped(h, w2, ends)


def prefers_grouped(x: Tensor, w1: Tensor) -> bool:
    """Whether grouped products work on these operands and are no slower than the loop."""
    widths = (w1.size(-1) * w1.element_size(), w1.size(-2) * w1.element_size())
    aligned = all(width % ALIGNMENT == 0 for width in widths)
    return x.dtype == torch.bfloat16 and x.size(0) > 0 and aligned


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _ContiguousGradient.apply(torch._grouped_mm(x, weight.mT, offs=ends))


class _ContiguousGradient(torch.autograd.Function):
    """The identity; torch._grouped_mm refuses gradients that are expanded."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
