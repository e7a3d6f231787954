"""Sizes and flavors of the image transformer, and checks of its sharding; torch-free."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.sizes import head_problems, split_problems


@dataclass(frozen=True)
class ImageTransformerConfig:
    """Sizes of an image transformer; each field is a key of [model]."""

    dim: Annotated[int, Field(gt=0, description="width of the residual stream")]
    num_layers: Annotated[int, Field(gt=0, description="number of transformer blocks")]
    num_heads: Annotated[int, Field(gt=0, description="query heads per attention")]
    num_kv_heads: Annotated[
        int | None,
        Field(gt=0, description="key and value heads, each shared by a group of query heads"),
    ]
    ffn_hidden_dim: Annotated[int, Field(gt=0, description="hidden width of the SwiGLU")]
    vocab_size: Annotated[int, Field(gt=0, description="values a pixel can take")]
    image_height: Annotated[int, Field(gt=0, description="rows of an image")]
    image_width: Annotated[int, Field(gt=0, description="columns of an image")]
    image_channels: Annotated[int, Field(gt=0, description="channels of an image")]
    norm_eps: Annotated[float, Field(gt=0, description="epsilon of the RMSNorms")] = 1e-5
    zero_init_output: Annotated[
        bool, Field(description="start the output layer at zero: the first loss is ln(vocab_size)")
    ] = True

    dropout: Annotated[
        float,
        Field(ge=0, lt=1, description="dropout of embeddings and of attention and FFN outputs"),
    ] = 0.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """num_kv_heads, or num_heads if that is None (plain multi-head attention)."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def seq_len(self) -> int:
        """The fixed sequence length: each pixel value of an image is a token."""
        return self.image_height * self.image_width * self.image_channels

    @property
    def module_names(self) -> tuple[str, ...]:
        """The modules in the order of the forward pass, between which a pipeline can split."""
        blocks = (f"layers.{index}" for index in range(self.num_layers))
        return ("embeddings", *blocks, "norm", "output")

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the token, row, column and channel tables."""
        rows = self.vocab_size + self.image_height + self.image_width + self.image_channels
        return rows * self.dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; the output layer is not tied to the token table."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_hidden_dim + 2 * self.dim
        head = self.dim + self.dim * self.vocab_size
        return self.num_embedding_parameters + self.num_layers * block + head

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs of one token in a sequence of `seq_len`.

        6 N for the matrix products (two FLOPs per multiply-add, one forward and two backward
        products per weight), and 12 L D T for attention without causal masking, as in PaLM,
        appendix B (https://arxiv.org/abs/2204.02311).
        """
        multiplied = self.num_parameters - self.num_embedding_parameters
        return 6 * multiplied + 12 * self.num_layers * self.dim * seq_len

    def problems(self, dims: ParallelDims, seq_len: int) -> list[tuple[str, str]]:
        """The conflicts between these sizes, and between them and `dims`.

        A list of (key, "what is wrong; what to do").
        """
        # Tensor parallelism shards heads and the SwiGLU's hidden width, sequence parallelism shards
        # tokens.
        split = {
            "model.num_heads": self.num_heads,
            "model.ffn_hidden_dim": self.ffn_hidden_dim,
            "the number of tokens": seq_len,
        }
        if self.num_kv_heads is not None:
            split["model.num_kv_heads"] = self.num_kv_heads
        heads = ("model.num_heads", self.num_heads), ("model.num_kv_heads", self.kv_heads)
        return [*head_problems(self.dim, *heads), *split_problems(dims, split, self.vocab_size)]


def _sizes(side: int, channels: int, vocab_size: int, **sizes: Any) -> ImageTransformerConfig:
    """The sizes for square images."""
    return ImageTransformerConfig(
        num_kv_heads=None,
        vocab_size=vocab_size,
        image_height=side,
        image_width=side,
        image_channels=channels,
        **sizes,
    )


FLAVORS = {
    # Small enough to learn handwritten digits on a laptop in minutes.
    "digits": _sizes(8, 1, 17, dim=96, num_layers=4, num_heads=4, ffn_hidden_dim=256),
    # 32 x 32 colour images: 3,072 tokens.
    "cifar": _sizes(32, 3, 256, dim=256, num_layers=16, num_heads=2, ffn_hidden_dim=384),
    # For tests: a step takes milliseconds, and every size divides by 8.
    "debug": _sizes(8, 1, 17, dim=32, num_layers=2, num_heads=8, ffn_hidden_dim=64),
}
