"""Sizes and flavors of Llama 3, and checks of its sharding; torch-free.

Names, defaults and flavors are TorchTitan v0.2.2's (torchtitan/models/llama3), so that a job's
[model] carries over. Its `rope_scaling_args` are the four fields that begin with `rope_scaling_`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.sizes import head_problems, split_problems


@dataclass(frozen=True)
class Llama3Config:
    """Sizes of a Llama 3; each field is a key of [model]."""

    dim: Annotated[int, Field(gt=0, description="width of the residual stream")] = 4096
    n_layers: Annotated[int, Field(gt=0, description="number of transformer blocks")] = 32
    n_heads: Annotated[int, Field(gt=0, description="query heads per attention")] = 32
    n_kv_heads: Annotated[
        int | None,
        Field(gt=0, description="key and value heads, each shared by a group of query heads"),
    ] = None
    vocab_size: Annotated[int, Field(gt=0, description="size of the vocabulary")] = 128256
    multiple_of: Annotated[
        int, Field(gt=0, description="the SwiGLU's hidden width is rounded up to a multiple of it")
    ] = 256
    ffn_dim_multiplier: Annotated[
        float | None,
        Field(gt=0, description="factor on the SwiGLU's hidden width of 8/3 model.dim"),
    ] = None
    norm_eps: Annotated[float, Field(gt=0, description="epsilon of the RMSNorms")] = 1e-5
    rope_theta: Annotated[
        float, Field(gt=0, description="base of the rotary embeddings' wavelengths")
    ] = 10000.0
    rope_scaling_factor: Annotated[
        float, Field(gt=0, description="factor by which long wavelengths are stretched; 1: none")
    ] = 8.0
    rope_scaling_low_freq_factor: Annotated[
        float,
        Field(gt=0, description="wavelengths above the original length / this are stretched fully"),
    ] = 1.0
    rope_scaling_high_freq_factor: Annotated[
        float, Field(gt=0, description="wavelengths below the original length / this are kept")
    ] = 4.0
    rope_scaling_original_max_position_embeddings: Annotated[
        int, Field(gt=0, description="the length to which the wavelengths are compared")
    ] = 8192
    depth_init: Annotated[
        bool,
        Field(description="initial standard deviations fall with a block's depth, else with all"),
    ] = True
    tie_embeddings: Annotated[
        bool, Field(description="the output layer's weight is the embedding table")
    ] = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """n_kv_heads, or n_heads if that is None (plain multi-head attention)."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_hidden_dim(self) -> int:
        """The hidden width of the SwiGLU: 8/3 dim times the multiplier, rounded up."""
        hidden = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        return -(-hidden // self.multiple_of) * self.multiple_of

    @property
    def module_names(self) -> tuple[str, ...]:
        """The modules in the order of the forward pass, between which a pipeline can split."""
        blocks = (f"layers.{index}" for index in range(self.n_layers))
        return ("tok_embeddings", *blocks, "norm", "output")

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied table counts once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_hidden_dim + 2 * self.dim
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return tables + self.n_layers * block + self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs of one token in a sequence of `seq_len`.

        6 N for the matrix products and 12 L D T for attention without causal masking (PaLM,
        appendix B, arXiv 2204.02311). Looking up an embedding costs nothing.
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return 6 * (self.num_parameters - looked_up) + 12 * self.n_layers * self.dim * seq_len

    def problems(self, dims: ParallelDims, seq_len: int) -> list[tuple[str, str]]:
        """The conflicts between these sizes, and between them and `dims`.

        A list of (key, "what is wrong; what to do").
        """
        split = {
            "model.n_heads": self.n_heads,
            "the SwiGLU's hidden width": self.ffn_hidden_dim,
            "the number of tokens": seq_len,
        }
        if self.n_kv_heads is not None:
            split["model.n_kv_heads"] = self.n_kv_heads
        heads = ("model.n_heads", self.n_heads), ("model.n_kv_heads", self.kv_heads)
        found = [*head_problems(self.dim, *heads), *split_problems(dims, split, self.vocab_size)]
        if not self.dim % self.n_heads and self.head_dim % 2:
            message = (
                f"{self.n_heads} gives heads of an odd width, {self.head_dim}, which rotary "
                "embeddings cannot pair; give a number of heads that divides model.dim / 2"
            )
            found.append(("model.n_heads", message))
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        if low >= high:
            message = f"{low:g} is not below rope_scaling_high_freq_factor {high:g}; give less"
            found.append(("model.rope_scaling_low_freq_factor", message))
        return found


FLAVORS = {
    "debugmodel": Llama3Config(
        dim=256, n_layers=6, n_heads=16, vocab_size=2048, rope_theta=500000.0
    ),
    # 256 bytes and an end-of-text token, padded to a multiple of 16.
    "tiny": Llama3Config(
        dim=128,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        vocab_size=272,
        multiple_of=32,
        rope_theta=500000.0,
    ),
    "small": Llama3Config(
        dim=256,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        vocab_size=272,
        multiple_of=256,
        rope_theta=500000.0,
    ),
    "8B": Llama3Config(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.3,
        multiple_of=1024,
        rope_theta=500000.0,
    ),
    "70B": Llama3Config(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        ffn_dim_multiplier=1.3,
        multiple_of=4096,
        rope_theta=500000.0,
    ),
    "405B": Llama3Config(
        dim=16384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        ffn_dim_multiplier=1.2,
        multiple_of=4096,
        rope_theta=500000.0,
    ),
}
