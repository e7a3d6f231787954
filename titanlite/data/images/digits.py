"""The 1,797 handwritten digits that scikit-learn brings along: 8x8, one channel, values 0..16.

Every sixth image is held out for validation, so both splits are spread over the whole file.
Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

from __future__ import annotations

import gzip

import numpy as np

from titanlite.data.images.packaged import packaged_file
from titanlite.data.images.pixels import pixels_to_tokens
from titanlite.data.stored import StoredSequences

LEVELS = 17
HEIGHT = WIDTH = 8
_HOLD_OUT_EVERY = 6


def load_digit_images(split: str) -> np.ndarray:
    """The split's images [N, 8, 8, 1] uint8, values 0..16: 1,498 to train on, 299 to validate."""
    # A row an image: its 64 pixels, and the digit it shows.
    with gzip.open(packaged_file("data/digits.csv.gz"), "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    pixels = rows[:, :-1].reshape(-1, HEIGHT, WIDTH, 1)
    held_out = np.arange(len(pixels)) % _HOLD_OUT_EVERY == _HOLD_OUT_EVERY - 1
    return pixels[held_out if split == "validation" else ~held_out]


def build_digits(split: str, *, seed: int, channels: int, vocab_size: int) -> StoredSequences:
    """The digits as tokens; training epochs are shuffled by (seed, epoch)."""
    tokens = pixels_to_tokens(
        load_digit_images(split), levels=LEVELS, channels=channels, vocab_size=vocab_size
    )
    return StoredSequences(tokens, shuffle_seed=seed if split == "train" else None)
