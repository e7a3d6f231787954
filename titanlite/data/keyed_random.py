"""Random numbers that are pure functions of a key.

Sample 10,007 of a data set must be the same on every rank, in every plan and after a restart. The
random numbers therefore have no state: each (seed, index) is a Philox counter stream of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

_MASK = 2**64 - 1

# One stream per use, so that uses with the same (seed, index) get independent numbers.
SHUFFLE, CROP, PATTERN, PLACES = 1, 2, 3, 4

_ROUNDS = 6


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


class Orders:
    """The places of samples 0, 1, ... of a set of `count`, which each epoch reads in another order.

    `make(seed, epoch, count)` is the order of an epoch; with `seed` None the order stays the same.
    """

    def __init__(self, make: Callable[[int, int, int], Any], seed: int | None, count: int) -> None:
        self._seed, self._count = seed, count
        # A global batch can span two epochs.
        self._make = functools.lru_cache(maxsize=2)(make)

    def place(self, index: int) -> int:
        """The place of sample `index`, which counts over all epochs."""
        epoch, position = divmod(index, self._count)
        if self._seed is None:
            return position
        return int(self._make(self._seed, epoch, self._count)[position])


class Permutation:
    """The order of an epoch of `count` samples, one element at a time: `order[position]`.

    Needs no memory, so that an epoch may have billions of samples. It is a Feistel network over
    the smallest square of a power of two that holds `count`, walked until it is below `count`.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 3 and 4.
    """

    def __init__(self, seed: int, epoch: int, count: int) -> None:
        self._count = count
        self._bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._keys = [int(word) for word in random_words(seed, epoch, PLACES, _ROUNDS)]

    def __getitem__(self, position: int) -> int:
        while True:
            position = self._encrypt(position)
            if position < self._count:
                return position

    def _encrypt(self, value: int) -> int:
        mask = (1 << self._bits) - 1
        left, right = value >> self._bits, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << self._bits | right


def _mixed(word: int) -> int:
    """A 64-bit hash of a 64-bit word: the finalizer of SplitMix64 (Steele et al. 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK
    return word ^ word >> 31
