"""Samples with the number of each token's document, and its position within the document."""

from typing import Any

import torch
from torch import Tensor


class PackedDocuments:
    """Sample i by its own generator; endless, or the first 6. A quarter is a single document."""

    def __init__(self, num_samples: int | None, seed: int, seq_len: int, vocab_size: int) -> None:
        self.num_samples = num_samples
        self.seed, self.seq_len, self.vocab_size = seed, seq_len, vocab_size

    def sample(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        begins = torch.rand(self.seq_len, generator=generator) < (0.1 if index % 4 else 0.0)
        begins[0] = True
        documents = begins.cumsum(0) - 1
        indices = torch.arange(self.seq_len)
        return {
            "tokens": torch.randint(self.vocab_size, (self.seq_len,), generator=generator),
            "positions": indices - indices[begins][documents],
            "documents": documents,
        }


def build(*, model: Any, seq_len: int, split: str, seed: int, **_: Any) -> PackedDocuments:
    is_validation = split == "validation"
    number, seed = (6, 0) if is_validation else (None, seed)
    return PackedDocuments(number, seed, seq_len, model.vocab_size)
