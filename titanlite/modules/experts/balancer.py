"""Balancer: the expert layers of a job, their load over all ranks, and their balancing biases.

Source of the bias: arXiv 2408.15664, in TorchTitan's form, whose changes have a mean of zero.
"""

from collections.abc import Iterable, Mapping
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.modules.experts.layer import RoutedLayer
from titanlite.modules.names import canonical_name


def expert_layers(parts: Iterable[nn.Module]) -> dict[str, RoutedLayer]:
    """The expert layers of the parts of a model by canonical name."""
    return {
        canonical_name(name): module
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, RoutedLayer)
    }


class Balancer:
    """The expert layers of a job, as far as this rank has them.

    `sizes` has the number of experts of every expert layer of the whole model, `layers` has those
    of this rank's parts. `has_loss` says whether any layer has an auxiliary loss, and `can_drop`
    whether any has a limited capacity.

    A step calls `start`, runs its forward and backward passes, calls `finish`, `read` and, before
    the optimizer's update, `update`. Every rank of the world must call `finish`.
    """

    def __init__(
        self,
        layers: Mapping[str, RoutedLayer],
        sizes: Mapping[str, int],
        device: torch.device,
        *,
        has_loss: bool = False,
        can_drop: bool = False,
    ) -> None:
        self.layers, self.sizes, self.has_loss = layers, dict(sizes), has_loss
        self.can_drop = can_drop
        self._device = device
        self.counts: dict[str, list[int]] = {}
        """Layer -> the slots of each expert in the last step, summed over all ranks."""
        self.num_dropped: int | None = None
        """The slots that all layers dropped in the last step, on all ranks; None: none can be."""
        self.loss: float | None = None
        """The auxiliary loss of the last step, summed over layers, the mean over sequences."""

    @property
    def num_sums(self) -> int:
        """The numbers that `finish` sums over the ranks."""
        return sum(self.sizes.values()) + 2

    def start(self, num_sequences: int) -> None:
        """Start a step of `num_sequences` sequences on all ranks."""
        for layer in self.layers.values():
            layer.tally.reset()
            layer.tally.num_sequences = num_sequences

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the tallies over all ranks: a token counts on the one rank that routes it."""
        sizes = [*self.sizes.values(), 1, 1]
        self._sums = torch.zeros(self.num_sums, dtype=torch.float64, device=self._device)
        *rows, dropped, loss = self._sums.split(sizes)
        self._rows = dict(zip(self.sizes, rows, strict=True))
        for name, layer in self.layers.items():
            tally = layer.tally
            if tally.counts is not None:
                self._rows[name].copy_(tally.counts)
            if tally.dropped is not None:
                dropped += tally.dropped
            if tally.loss is not None:
                loss += tally.loss / tally.num_sequences
        dist.all_reduce(self._sums)

    def read(self, others: Tensor) -> list[float]:
        """The numbers of `others`, float64 [N]; those of `finish` are read with them."""
        values = iter(torch.cat([others, self._sums]).tolist())
        found = list(islice(values, len(others)))
        self.counts = {n: [*map(round, islice(values, size))] for n, size in self.sizes.items()}
        dropped, loss = values
        self.num_dropped = round(dropped) if self.can_drop else None
        self.loss = loss if self.has_loss else None
        return found

    @torch.no_grad()
    def update(self) -> None:
        """Raise the bias of experts with fewer slots than the mean, and lower that of the others.

        By `bias_step` each, less the mean of these changes: the mean of the biases stays zero.
        """
        for name, layer in self.layers.items():
            if layer.expert_bias is None or layer.bias_step is None:
                continue
            counts = self._rows[name]
            # mean - count, times the number of experts, in whole numbers.
            signs = (counts.sum() - counts * counts.numel()).sign()
            change = signs.to(layer.expert_bias.dtype) * layer.bias_step
            layer.expert_bias += change - change.mean()
