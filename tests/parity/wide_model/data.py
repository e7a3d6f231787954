"""Samples with four fields beside their tokens, and a loss that reads two of them."""

from typing import Any

import torch
from torch import Tensor

from titanlite.modules.batch import Batch
from titanlite.training.loss import Loss


class Weighted:
    """Sample i by its own generator; endless, or the first 6."""

    def __init__(self, num_samples: int | None, seed: int, seq_len: int, vocab_size: int) -> None:
        self.num_samples = num_samples
        self.seed, self.seq_len, self.vocab_size = seed, seq_len, vocab_size

    def sample(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        tokens = torch.randint(self.vocab_size, (self.seq_len,), generator=generator)
        return {
            "tokens": tokens,
            # Not the next token, but this one's neighbour in the vocabulary.
            "targets": (tokens + 1) % self.vocab_size,
            "weights": torch.randint(3, (self.seq_len,), generator=generator),
            "levels": torch.rand(self.seq_len, generator=generator, dtype=torch.float64),
            "label": torch.tensor(index % 3),
        }


def build(*, model: Any, seq_len: int, split: str, seed: int, **_: Any) -> Weighted:
    is_validation = split == "validation"
    return Weighted(6 if is_validation else None, 0 if is_validation else seed, seq_len, 17)


def weighted_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The cross-entropies of a batch, each as often as its weight says."""
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
    )
    return (losses * batch["weights"].flatten() * (batch.targets.flatten() >= 0)).sum()


WEIGHTED = Loss(weighted_loss, lambda batch: (batch["weights"] * (batch.targets >= 0)).sum())
