# dit/sizes.py
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    dim: int = 32
    num_layers: int = 2
    num_heads: int = 4
