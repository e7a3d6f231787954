"""Balancer: the expert layers of a job, their load over all ranks, and their balancing biases.

Source of the bias: arXiv 2408.15664, in TorchTitan's form, whose changes have a mean of zero.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from titanlite.modules.experts.balance import Tally
from titanlite.modules.experts.layer import ExpertLayer
from titanlite.modules.names import canonical_name


def expert_layers(parts: Iterable[nn.Module]) -> dict[str, ExpertLayer]:
    """The expert layers of the parts of a model by canonical name."""
    return {
        canonical_name(name): module
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, ExpertLayer)
    }


class Balancer:
    """The expert layers of a job, as far as this rank has them.

    `sizes` has the number of experts of every expert layer of the whole model, `layers` has those
    of this rank's parts. `has_loss` says whether any layer has an auxiliary loss, and `can_drop`
    whether any has a limited capacity.

    A step calls `start`, runs its forward and backward passes, calls `finish` and, before the
    optimizer's update, `update`. Every rank of the world must call `finish`.
    """

    def __init__(
        self,
        layers: Mapping[str, ExpertLayer],
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

    def start(self, num_sequences: int) -> None:
        """Start a step of `num_sequences` sequences on all ranks."""
        for layer in self.layers.values():
            layer.tally.reset()
            layer.tally.num_sequences = num_sequences

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the tallies over all ranks: a token counts on the one rank that routes it."""
        counts = torch.zeros(sum(self.sizes.values()), dtype=torch.int64, device=self._device)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        rows = counts.split(list(self.sizes.values()))
        for name, row in zip(self.sizes, rows, strict=True):
            tally = self.layers[name].tally if name in self.layers else Tally()
            if tally.counts is not None:
                row.copy_(tally.counts)
            if tally.loss is not None:
                loss += tally.loss / tally.num_sequences
        dist.all_reduce(counts)
        self.counts = dict(zip(self.sizes, (row.tolist() for row in rows), strict=True))
        if self.can_drop:
            dropped = torch.zeros((), dtype=torch.int64, device=self._device)
            for layer in self.layers.values():
                if layer.tally.dropped is not None:
                    dropped += layer.tally.dropped
            dist.all_reduce(dropped)
            self.num_dropped = int(dropped)
        if self.has_loss:
            dist.all_reduce(loss)
            self.loss = float(loss)

    @torch.no_grad()
    def update(self) -> None:
        """Raise the bias of experts with fewer slots than the mean, and lower that of the others.

        By `bias_step` each, less the mean of these changes: the mean of the biases stays zero.
        """
        for name, layer in self.layers.items():
            if layer.expert_bias is None or layer.bias_step is None:
                continue
            counts = self.counts[name]
            total, number = sum(counts), len(counts)
            # mean - count, times the number of experts, in integers.
            signs = [(total > count * number) - (total < count * number) for count in counts]
            change = layer.expert_bias.new_tensor(signs) * layer.bias_step
            layer.expert_bias += change - change.mean()
