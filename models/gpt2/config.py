"""Sizes and flavors of GPT-2 and of Megatron-LM's models, and checks of its sharding; torch-free.

The flavors are GPT-2's four sizes, and those of two of Megatron-LM's papers by their number of
parameters: 1.2B to 8.3B (arXiv 1909.08053, table 2) and 1.7B to 1008B (arXiv 2104.04473, table 1).
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.sizes import head_problems, split_problems


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2; each field is a key of [model]."""

    dim: Annotated[int, Field(gt=0, description="width of the residual stream")] = 768
    n_layers: Annotated[int, Field(gt=0, description="number of transformer blocks")] = 12
    n_heads: Annotated[int, Field(gt=0, description="heads per attention")] = 12
    vocab_size: Annotated[int, Field(gt=0, description="size of the vocabulary")] = 50257
    max_seq_len: Annotated[
        int, Field(gt=0, description="number of learned positions: the longest sequence")
    ] = 1024
    norm_eps: Annotated[float, Field(gt=0, description="epsilon of the LayerNorms")] = 1e-5
    dropout: Annotated[
        float,
        Field(ge=0, lt=1, description="dropout of embeddings and of attention and FFN outputs"),
    ] = 0.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def ffn_hidden_dim(self) -> int:
        return 4 * self.dim

    @property
    def module_names(self) -> tuple[str, ...]:
        """The modules in the order of the forward pass, between which a pipeline can split."""
        blocks = (f"layers.{index}" for index in range(self.n_layers))
        return ("tok_embeddings", "pos_embeddings", *blocks, "norm", "output")

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; the tied table counts once.

        12 D^2 + 13 D of a block: 4 D^2 + 4 D of attention, 8 D^2 + 5 D of the feed-forward and 4 D
        of two LayerNorms.
        """
        block = 12 * self.dim**2 + 13 * self.dim
        tables = (self.vocab_size + self.max_seq_len) * self.dim
        return tables + self.n_layers * block + 2 * self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs of one token in a sequence of `seq_len`.

        6 N for the matrix products and 12 L D T for attention without causal masking (PaLM,
        appendix B, arXiv 2204.02311). The table counts once, for the output layer.
        """
        multiplied = self.num_parameters - self.max_seq_len * self.dim
        return 6 * multiplied + 12 * self.n_layers * self.dim * seq_len

    def problems(self, dims: ParallelDims, seq_len: int) -> list[tuple[str, str]]:
        """The conflicts between these sizes, and between them and `dims`.

        A list of (key, "what is wrong; what to do").
        """
        split = {
            "model.n_heads": self.n_heads,
            "the feed-forward's hidden width": self.ffn_hidden_dim,
            "the number of tokens": seq_len,
        }
        heads = ("model.n_heads", self.n_heads)
        found = [
            *head_problems(self.dim, heads, heads),
            *split_problems(dims, split, self.vocab_size),
        ]
        if seq_len > self.max_seq_len:
            message = (
                f"{seq_len} is more than the {self.max_seq_len} positions of model.max_seq_len; "
                "give at most that many tokens, or raise model.max_seq_len"
            )
            found.append(("training.seq_len", message))
        return found


def _megatron(dim: int, n_layers: int, n_heads: int, max_seq_len: int) -> GPT2Config:
    # GPT-2's 50,257 tokens, padded to a multiple of 128 times the tensor-parallel degree of 8.
    return GPT2Config(
        dim=dim, n_layers=n_layers, n_heads=n_heads, vocab_size=51200, max_seq_len=max_seq_len
    )


FLAVORS = {
    # 256 bytes and an end-of-text token, padded to a multiple of 16.
    "tiny": GPT2Config(dim=128, n_layers=4, n_heads=8, vocab_size=272, max_seq_len=512),
    "small": GPT2Config(dim=256, n_layers=6, n_heads=8, vocab_size=272),
    "124M": GPT2Config(dim=768, n_layers=12, n_heads=12),
    "355M": GPT2Config(dim=1024, n_layers=24, n_heads=16),
    "774M": GPT2Config(dim=1280, n_layers=36, n_heads=20),
    "1.5B": GPT2Config(dim=1600, n_layers=48, n_heads=25),
    "megatron-1.2B": _megatron(1536, 40, 16, 1024),
    "megatron-2.5B": _megatron(1920, 54, 20, 1024),
    "megatron-4.2B": _megatron(2304, 64, 24, 1024),
    "megatron-8.3B": _megatron(3072, 72, 32, 1024),
    "megatron-1.7B": _megatron(2304, 24, 24, 2048),
    "megatron-3.6B": _megatron(3072, 30, 32, 2048),
    "megatron-7.5B": _megatron(4096, 36, 32, 2048),
    "megatron-18.4B": _megatron(6144, 40, 48, 2048),
    "megatron-39.1B": _megatron(8192, 48, 64, 2048),
    "megatron-76.1B": _megatron(10240, 60, 80, 2048),
    "megatron-145.6B": _megatron(12288, 80, 96, 2048),
    "megatron-310.1B": _megatron(16384, 96, 128, 2048),
    "megatron-529.6B": _megatron(20480, 105, 128, 2048),
    "megatron-1008B": _megatron(25600, 128, 160, 2048),
}
