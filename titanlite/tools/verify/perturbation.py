"""On a rank: perturbs weights and inputs by as much as rounding may, for one forward and backward.

How far that moves each tensor of a step is how far rounding moves it: the tensor's sensitivity. The
idea is that of TTrace (arXiv 2506.09280).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from titanlite.modules.shards import local_part


class Perturbation:
    """The perturbation of one step of the `number`-th run, for kernels that compute in `dtype`.

    Each element is multiplied by 1 + d, with d uniform in +- half the spacing of `dtype` at 1.
    """

    def __init__(self, dtype: str, number: int, step: int) -> None:
        self._half = torch.finfo(getattr(torch, dtype)).eps / 2
        self._generator = torch.Generator().manual_seed(1000 * step + number)
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def perturb(self, parameters: Iterable[Tensor]) -> None:
        """Perturb these weights until `restore`."""
        for parameter in parameters:
            own = local_part(parameter)
            if own.is_floating_point():
                self._kept.append((own, own.clone()))
                own.copy_(self._moved(own))

    @torch.no_grad()
    def restore(self) -> None:
        """Give the weights their own values again, for the optimizer."""
        for own, before in self._kept:
            own.copy_(before)
        self._kept.clear()

    def inputs(self, batch: Any) -> Any:
        """A copy of a nest of tensors, with those of real numbers perturbed."""
        return tree_map_only(
            Tensor, lambda one: self._moved(one) if one.is_floating_point() else one, batch
        )

    def _moved(self, tensor: Tensor) -> Tensor:
        drawn = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float32)
        # In float32, so that the product is not lost in the rounding of a narrower one.
        factor = 1 + self._half * (2 * drawn - 1).to(tensor.device)
        return (tensor.detach() * factor).to(tensor.dtype)
