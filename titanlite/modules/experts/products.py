"""The SwiGLU of every expert on its own tokens: one expert after another, or grouped products.

torch._grouped_mm multiplies all experts' tokens in one call. It has no float64, and needs rows that
are multiples of 16 bytes. On CPU it is slower than the loop in float32, and faster in bfloat16.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.modules.experts.dispatch import host_sizes
from titanlite.modules.shards import ContiguousGradient

# Bytes: torch._grouped_mm refuses operands whose strides are no multiple of it.
ALIGNMENT = 16


def swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    counts: Tensor,
    *,
    sizes: Sequence[int] | None = None,
    drops: bool = False,
    grouped: bool | None = None,
) -> Tensor:
    """w2 (silu(w1 x) * w3 x) for each row of x [N, D], with the weights of the row's expert.

    w1 and w3 are [E, H, D], w2 is [E, D, H]. Rows are sorted by expert; `counts` [E] are the rows
    of each expert, and add up to N. With `drops` they may add up to less; of the rows beyond, the
    outputs are zero or left out. `grouped` chooses grouped products, which do not read `counts`, or
    a loop over experts, which takes `sizes`, the counts as numbers, or reads them; by default the
    faster one for these operands.
    """
    if grouped is None:
        grouped = prefers_grouped(x, w1)
    if not grouped:
        sizes = list(sizes or host_sizes(x.size(0), counts)[0])
        parts = [
            F.linear(F.silu(F.linear(rows, up)) * F.linear(rows, gate), down)
            for rows, up, down, gate in zip(
                x[: sum(sizes)].split(sizes), w1.unbind(), w2.unbind(), w3.unbind(), strict=True
            )
        ]
        return torch.cat(parts)
    ends = counts.cumsum(0).to(torch.int32)

    def kept(rows: Tensor) -> Tensor:
        # The kernel writes neither the outputs nor the gradients of rows beyond the last end.
        each = torch.arange(rows.size(0) if drops else 0, device=rows.device)
        return rows.masked_fill((each >= ends[-1]).unsqueeze(-1), 0) if drops else rows

    x = kept(x)
    h = kept(F.silu(grouped_product(x, w1, ends)) * grouped_product(x, w3, ends))
    return kept(grouped_product(h, w2, ends))


def prefers_grouped(x: Tensor, w1: Tensor) -> bool:
    """Whether grouped products work on these operands and are no slower than the loop."""
    widths = (w1.size(-1) * w1.element_size(), w1.size(-2) * w1.element_size())
    aligned = all(width % ALIGNMENT == 0 for width in widths)
    return x.dtype == torch.bfloat16 and x.size(0) > 0 and aligned


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The product [N, out] of each expert's rows of x [N, in], up to `ends` [E], with its weight.

    `weight` is [E, out, in].
    """
    # torch._grouped_mm refuses gradients that are expanded.
    return ContiguousGradient.apply(torch._grouped_mm(x, weight.mT, offs=ends))
