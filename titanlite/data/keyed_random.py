"""Random numbers that are pure functions of a key.

Sample 10,007 of a data set must be the same on every rank, in every plan and after a restart. The
random numbers therefore have no state: each (seed, index) is a Philox counter stream of its own.
"""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1

# One stream per use, so that uses with the same (seed, index) get independent numbers.
SHUFFLE, CROP, PATTERN = 1, 2, 3


def random_words(seed: int, index: int, stream: int, count: int) -> np.ndarray:
    """`count` uniform 64-bit words, a pure function of (seed, index, stream).

    These are the raw output of the generator, not NumPy's distributions: the raw stream is the
    same in all NumPy versions, the distributions are not (NEP 19).
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox).
    """
    key = np.array([seed & _MASK, index & _MASK], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch: a uniform permutation of range(count), int64, by (seed, epoch)."""
    return np.argsort(random_words(seed, epoch, SHUFFLE, count), kind="stable")
