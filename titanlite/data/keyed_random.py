"""Random numbers that depend on nothing but their key.

A data set must answer "what is sample 10,007?" alike on every rank, in every plan and after a
restart, so nothing here has a state to carry: each (seed, index) is its own Philox counter stream.
"""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1

# One stream for each use: the same (seed, index) must not order an epoch and place a crop alike.
SHUFFLE, CROP, PATTERN = 1, 2, 3


def random_words(seed: int, index: int, stream: int, count: int) -> np.ndarray:
    """`count` uniform 64-bit words, a pure function of (seed, index, stream).

    The raw output of a counter-based generator is used, not NumPy's distributions: the raw
    stream is fixed across NumPy versions, the distributions are not (NEP 19).
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox).
    """
    key = np.array([seed & _MASK, index & _MASK], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch: a uniform permutation of range(count), int64, by (seed, epoch)."""
    return np.argsort(random_words(seed, epoch, SHUFFLE, count), kind="stable")
