"""The sizes of the model with adapters; no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """`rank` is that of the adapters; `trains_head` says whether the head is trained too."""

    vocab_size: int = 17
    dim: int = 16
    num_layers: int = 4
    rank: int = 2
    first_adapter: int = 0
    trains_head: bool = False
