"""Sizes of the wide model: it has no length of its own, and no images; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.mesh.parallel_dims import ParallelDims


@dataclass(frozen=True)
class WideConfig:
    """Those of the rotary model, for sequences of any length."""

    dim: int = 32
    hidden_dim: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 17

    num_parameters = 1

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def module_names(self) -> tuple[str, ...]:
        blocks = (f"layers.{index}" for index in range(self.num_layers))
        return ("tok_emb", *blocks, "norm", "output")

    def flops_per_token(self, seq_len: int) -> int:
        return 6 * seq_len

    def problems(self, dims: ParallelDims, seq_len: int) -> list[tuple[str, str]]:
        return []


FLAVORS = {"small": WideConfig()}
