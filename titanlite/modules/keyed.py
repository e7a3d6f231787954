"""Random numbers that are functions of a sample: noise for models, losses and data sets.

What torch.randn draws depends on how the batch is split over ranks and microbatches. Here each
number is a function of a sample's key, a name and a place, so it is the same under every plan, on
every device, and in recomputation. A batch has the keys of its samples as its field `sample_keys`;
they are functions of the job's seed and of the number of the sample in the run, so every epoch has
new ones. The generator is "squares" (Widynski 2020, arXiv 2004.06278).
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = 2**32 - 1


def sample_keys(numbers: Tensor, seed: int | None = 0) -> Tensor:
    """The keys of the samples with these `numbers` [...] in a run: int64 [...], not negative.

    Samples of other seeds have other keys. `seed` None is that of validation sets, whose keys are
    the same in every run.
    """
    return _mixed(numbers.to(torch.int64) + _hash_of(f"samples:{seed}")) & (2**63 - 1)


def keyed_normal(
    keys: Tensor,
    shape: Sequence[int] = (),
    what: str = "noise",
    *,
    positions: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normal numbers of mean 0 and variance 1, a function of each key: [*keys.shape, *shape].

    `keys` are `sample_keys` of a batch; other names `what` give independent numbers. With
    `positions` [T] or [B, T] of tokens in their sequences, the result is [B, T, *shape], and a rank
    gets the numbers of its tokens. `dtype` is by default torch's; float32 and float64 differ by
    rounding only. The result is on the device of the keys.
    """
    dtype = dtype or torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    number = math.prod(shape)
    # Box and Muller 1958: two uniform numbers, the first in (0, 1], make two normal ones.
    words = _words(keys, -(-number // 2) * 2, what, positions) >> 8
    words = words.to(wide).unflatten(-1, (-1, 2))
    radius = (-2 * torch.log((words[..., 0] + 1) * 2.0**-24)).sqrt()
    angle = words[..., 1] * (2 * math.pi * 2.0**-24)
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2)
    return pairs[..., :number].unflatten(-1, (*shape, 1)).squeeze(-1).to(dtype)


def keyed_uniform(
    keys: Tensor,
    shape: Sequence[int] = (),
    what: str = "uniform",
    *,
    positions: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2**-24, a function of each key, like keyed_normal."""
    dtype = dtype or torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    words = _words(keys, math.prod(shape), what, positions)
    # A narrower dtype has fewer numbers below 1.
    bits = 24 if dtype == wide else 8
    uniform = (words >> (32 - bits)).to(wide) * 2.0**-bits
    return uniform.unflatten(-1, (*shape, 1)).squeeze(-1).to(dtype)


def _words(keys: Tensor, number: int, what: str, positions: Tensor | None) -> Tensor:
    """Uniform integers in [0, 2**32): int64 [*keys.shape, number], or [B, T, number]."""
    keys = _mixed(keys + _hash_of(what))
    if positions is not None:
        keys = _mixed(keys[:, None] + _hash_of("position") + positions.to(keys.device))
    return _squares(torch.arange(1, number + 1, device=keys.device), keys[..., None] | 1)


def _squares(counter: Tensor, key: Tensor) -> Tensor:
    """A uniform integer in [0, 2**32) for each counter under a key: four rounds of squares.

    int64 products wrap, as unsigned ones do.
    """
    y = counter * key
    z = y + key
    x = y
    for added in (y, z, y):
        x = x * x + added
        x = x << 32 | x >> 32 & _LOW
    return (x * x + z) >> 32 & _LOW


def _mixed(x: Tensor) -> Tensor:
    """A permutation of the 64-bit words: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ x >> 30 & 2**34 - 1) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ x >> 27 & 2**37 - 1) * _signed(0x94D049BB133111EB)
    return x ^ x >> 31 & 2**33 - 1


def _signed(word: int) -> int:
    """A 64-bit word as an int64."""
    return word - 2**64 if word >= 2**63 else word


@torch.compiler.assume_constant_result
def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
