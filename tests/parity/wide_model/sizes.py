"""Sizes of the wide model: it has no length of its own, and no images; torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WideConfig:
    """Those of the rotary model, for sequences of any length."""

    dim: int = 32
    hidden_dim: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 17

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


FLAVORS = {"small": WideConfig()}
