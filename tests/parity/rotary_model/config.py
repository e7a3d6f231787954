"""Sizes of the rotary model; torch-free."""

from dataclasses import dataclass

from plain_model.config import PlainConfig


@dataclass(frozen=True)
class RotaryConfig(PlainConfig):
    """Grouped-query attention over 8 x 8 images, read as a sequence."""

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def module_names(self) -> tuple[str, ...]:
        blocks = (f"layers.{index}" for index in range(self.num_layers))
        return ("tok_emb", *blocks, "norm", "output")


FLAVORS = {"small": RotaryConfig()}
