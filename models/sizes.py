"""Checks of a transformer's sizes, for the configurations of several models; torch-free.

Each returns a list of (key, "what is wrong; what to do"), as `problems` of a configuration does.
"""

import math
from collections.abc import Mapping, Sequence

from titanlite.errors import nearest
from titanlite.mesh.parallel_dims import ParallelDims, divisors

Problems = list[tuple[str, str]]


def head_problems(dim: int, heads: tuple[str, int], kv_heads: tuple[str, int]) -> Problems:
    """Query heads that do not divide model.dim, or key/value heads that do not divide them.

    `heads` and `kv_heads` are (key, number).
    """
    found = []
    (key, number), (kv_key, kv_number) = heads, kv_heads
    if dim % number:
        legal = nearest(number, divisors(dim))
        found.append((key, f"{number} does not divide model.dim {dim}; give {legal}"))
    if number % kv_number:
        legal = nearest(kv_number, divisors(number))
        found.append((kv_key, f"{kv_number} does not divide {key} {number}; give {legal}"))
    return found


def share_problems(tp: int, numbers: Mapping[str, int]) -> Problems:
    """A tensor-parallel degree that does not divide a number, by its name."""
    key = "parallelism.tensor_parallel_degree"
    return [
        (key, f"{tp} does not divide {name} {number}; give one of {_listed(divisors(number))}")
        for name, number in numbers.items()
        if number % tp
    ]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def split_problems(dims: ParallelDims, split: Mapping[str, int], vocab_size: int) -> Problems:
    """A tensor-parallel degree that does not divide every size of `split`, by its name.

    The vocabulary may be sharded unevenly, but every rank needs a part.
    """
    uneven = [f"{name} {size}" for name, size in split.items() if size % dims.tp]
    wrong = []
    if uneven:
        wrong.append(f"does not divide {' or '.join(uneven)}")
    if dims.tp > vocab_size:
        wrong.append(f"is more than model.vocab_size {vocab_size}")
    if not wrong:
        return []
    common = divisors(math.gcd(*split.values()))
    legal = nearest(dims.tp, [tp for tp in common if tp <= vocab_size])
    message = f"{dims.tp} {' and '.join(wrong)}; give {legal}"
    return [("parallelism.tensor_parallel_degree", message)]
