"""Generated stripes of random slope and phase, for any image shape and vocabulary.

Each image is a triangle wave along a random direction, with one phase per channel. A few pixels
determine the following ones, so a model's loss falls far below ln(vocab_size).
"""

from typing import Any

import numpy as np
import torch

from titanlite.data.keyed_random import PATTERN, random_words

# Phases are integers, in units of 1/65,536 of a period, so tokens are the same on any machine.
_PERIOD = 1 << 16
_FASTEST = _PERIOD // 6

NUM_VALIDATION_SAMPLES = 256


class SyntheticImages:
    """Endless patterns; sample `index` is keyed by (seed, index).

    With `num_samples`, sample `i` is pattern `i mod num_samples`.
    """

    def __init__(
        self,
        *,
        height: int,
        width: int,
        channels: int,
        vocab_size: int,
        seed: int,
        num_samples: int | None = None,
    ) -> None:
        self.num_samples = num_samples
        self._channels, self._vocab_size, self._seed = channels, vocab_size, seed
        self._rows = np.arange(height)[:, None]
        self._columns = np.arange(width)[None, :]

    def sample(self, index: int) -> torch.Tensor:
        if self.num_samples is not None:
            index %= self.num_samples
        words = random_words(self._seed, index, PATTERN, 2 + self._channels)
        down, across = (words[:2] % np.uint64(2 * _FASTEST + 1)).astype(np.int64) - _FASTEST
        phases = (words[2:] % np.uint64(_PERIOD)).astype(np.int64)
        waves = (phases[:, None, None] + self._rows * down + self._columns * across) % _PERIOD
        triangles = np.minimum(waves, _PERIOD - waves)
        return torch.from_numpy((triangles * self._vocab_size // (_PERIOD // 2 + 1)).reshape(-1))


def build_synthetic(
    split: str, *, seed: int, height: int, width: int, channels: int, vocab_size: int, **_: Any
) -> SyntheticImages:
    """Endless patterns for training, or 256 fixed ones for validation."""
    validation = split == "validation"
    return SyntheticImages(
        height=height,
        width=width,
        channels=channels,
        vocab_size=vocab_size,
        # The key of seed -1 is 2**64 - 1, which no run uses as a seed, so the splits are disjoint.
        seed=-1 if validation else seed,
        num_samples=NUM_VALIDATION_SAMPLES if validation else None,
    )
