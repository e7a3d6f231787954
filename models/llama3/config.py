"""Sizes and flavors of Llama 3, and checks of its sharding; torch-free.

Names, defaults and flavors are TorchTitan v0.2.2's (torchtitan/models/llama3), so that a job's
[model] carries over. Its `rope_scaling_args` are the four fields that begin with `rope_scaling_`.
With `moe_num_experts`, the feed-forward of some blocks is a mixture of experts. The fields that
begin with `moe_` are TorchTitan's `moe_args`, and what its llama4 and deepseek_v3 say about which
blocks have experts, and how wide these are.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from titanlite.mesh.parallel_dims import ParallelDims, expert_shard_dim
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

    moe_num_experts: Annotated[
        int, Field(ge=0, description="experts of a block's feed-forward; 0: one dense feed-forward")
    ] = 0
    moe_top_k: Annotated[int, Field(gt=0, description="experts that a token is routed to")] = 1
    moe_hidden_dim: Annotated[
        int | None, Field(gt=0, description="hidden width of an expert; if not set, the dense one")
    ] = None
    moe_num_shared_experts: Annotated[
        int, Field(ge=0, description="experts that every token uses, as one wide feed-forward")
    ] = 0
    moe_n_dense_layers: Annotated[
        int, Field(ge=0, description="blocks at the start with a dense feed-forward (DeepSeek)")
    ] = 0
    moe_interleave_layer_step: Annotated[
        int, Field(gt=0, description="every n-th of the other blocks has experts (Llama 4)")
    ] = 1
    moe_score_func: Annotated[
        Literal["softmax", "sigmoid"], Field(description="from the router's logits to scores")
    ] = "sigmoid"
    moe_route_norm: Annotated[
        bool, Field(description="divide the scores of a token's experts by their sum")
    ] = False
    moe_route_scale: Annotated[
        float, Field(gt=0, description="factor on the scores of a token's experts")
    ] = 1.0
    moe_score_before_experts: Annotated[
        bool, Field(description="scores multiply the experts' inputs, not their outputs")
    ] = True
    moe_load_balance_coeff: Annotated[
        float | None,
        Field(gt=0, description="change of the balancing bias per step; if not set, no bias"),
    ] = 1e-3
    moe_sequence_loss_coeff: Annotated[
        float, Field(ge=0, description="factor on the sequence auxiliary loss; 0: none")
    ] = 0.0
    moe_capacity_factor: Annotated[
        float | None,
        Field(
            gt=0,
            description="in training, an expert takes at most this many times the mean number"
            " of tokens of a sequence, and drops the others; if not set, it takes all",
        ),
    ] = None

    @property
    def num_experts(self) -> int:
        """The routed experts of a block; 0 for a dense model."""
        return self.moe_num_experts

    @property
    def expert_hidden_dim(self) -> int:
        return self.ffn_hidden_dim if self.moe_hidden_dim is None else self.moe_hidden_dim

    @property
    def expert_bias(self) -> bool:
        """Whether expert layers have a balancing bias."""
        return self.moe_num_experts > 0 and self.moe_load_balance_coeff is not None

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of block `layer`, counted from 0, is a mixture of experts."""
        place = layer - self.moe_n_dense_layers
        is_due = place >= 0 and (place + 1) % self.moe_interleave_layer_step == 0
        return is_due and self.moe_num_experts > 0

    @property
    def num_expert_layers(self) -> int:
        """The blocks with experts."""
        return sum(map(self.has_experts, range(self.n_layers)))

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
        return self._count_parameters(self.moe_num_experts)

    @property
    def num_active_parameters(self) -> int:
        """The parameters that one token uses."""
        return self._count_parameters(self.moe_top_k)

    def _count_parameters(self, experts_per_layer: int) -> int:
        """The parameters, counting that many routed experts in each block that has them."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        block = attention + 2 * self.dim
        dense = 3 * self.dim * self.ffn_hidden_dim
        one = 3 * self.dim * self.expert_hidden_dim
        sparse = (experts_per_layer + self.moe_num_shared_experts) * one
        sparse += self.dim * self.moe_num_experts
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        number = self.num_expert_layers
        feed_forwards = number * sparse + (self.n_layers - number) * dense
        return tables + self.n_layers * block + feed_forwards + self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs of one token in a sequence of `seq_len`.

        6 N for the matrix products and 12 L D T for attention without causal masking (PaLM,
        appendix B, arXiv 2204.02311). N counts the parameters that the token uses. Looking up an
        embedding costs nothing.
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        used = self.num_active_parameters - looked_up
        return 6 * used + 12 * self.n_layers * self.dim * seq_len

    def problems(self, dims: ParallelDims, seq_len: int) -> list[tuple[str, str]]:
        """The conflicts between these sizes, and between them and `dims`.

        A list of (key, "what is wrong; what to do").
        """
        split = {"model.n_heads": self.n_heads}
        if self.num_expert_layers < self.n_layers:
            split["the SwiGLU's hidden width"] = self.ffn_hidden_dim
        if self.num_expert_layers and self.moe_num_shared_experts:
            shared = self.moe_num_shared_experts * self.expert_hidden_dim
            split["the shared experts' hidden width"] = shared
        split["the number of tokens"] = seq_len
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
        return [*found, *self._expert_problems(dims)]

    def _expert_problems(self, dims: ParallelDims) -> list[tuple[str, str]]:
        """The conflicts between the sizes of the experts, and between them and `dims`."""
        if not self.moe_num_experts:
            return []
        found = []
        if self.moe_top_k > self.moe_num_experts:
            message = (
                f"{self.moe_top_k} is more than model.moe_num_experts {self.moe_num_experts}; "
                "give at most that"
            )
            found.append(("model.moe_top_k", message))
        if not self.num_expert_layers:
            message = (
                f"{self.moe_n_dense_layers} dense blocks and a step of "
                f"{self.moe_interleave_layer_step} leave none of the {self.n_layers} blocks with "
                "experts; give fewer, or a smaller model.moe_interleave_layer_step"
            )
            found.append(("model.moe_n_dense_layers", message))
        has_own_shards = dims.ep_enabled or dims.tp_enabled
        if has_own_shards and not dims.num_expert_ranks % dims.ep:
            found += self._expert_shard_problems(dims.num_expert_shards, dims.ep)
        return found

    def _expert_shard_problems(self, num_shards: int, ep: int) -> list[tuple[str, str]]:
        """Experts that FSDP2 can shard neither by expert nor by rows over `num_shards` ranks."""
        number = self.moe_num_experts // ep
        widths = (self.expert_hidden_dim, self.dim)
        is_by_expert = number and expert_shard_dim(number, num_shards) == 0
        if is_by_expert or not any(width % num_shards for width in widths):
            return []
        message = (
            f"{ep} leaves {number} experts on a rank, which {num_shards} ranks (efsdp) cannot "
            f"share, because {num_shards} does not divide the widths {widths[0]} and {widths[1]} "
            "either; give a larger degree"
        )
        return [("parallelism.expert_parallel_degree", message)]


def _llama3(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int | None, **more: Any
) -> Llama3Config:
    return Llama3Config(dim, n_layers, n_heads, n_kv_heads, rope_theta=500000.0, **more)


# 256 bytes and an end-of-text token, padded to a multiple of 16.
BYTES = 272

FLAVORS = {
    "debugmodel": _llama3(256, 6, 16, None, vocab_size=2048),
    "tiny": _llama3(128, 4, 8, 4, vocab_size=BYTES, multiple_of=32),
    "small": _llama3(256, 6, 8, 4, vocab_size=BYTES),
    "8B": _llama3(4096, 32, 32, 8, ffn_dim_multiplier=1.3, multiple_of=1024),
    "70B": _llama3(8192, 80, 64, 8, ffn_dim_multiplier=1.3, multiple_of=4096),
    "405B": _llama3(16384, 126, 128, 8, ffn_dim_multiplier=1.2, multiple_of=4096),
    # As many parameters per token as a dense feed-forward of hidden width 688.
    "moe_tiny": _llama3(
        *(256, 4, 8, 4),
        vocab_size=BYTES,
        moe_num_experts=8,
        moe_top_k=2,
        moe_hidden_dim=344,
        moe_score_func="softmax",
        moe_route_norm=True,
        moe_score_before_experts=False,
    ),
    # Dense and expert blocks, a shared expert, both kinds of balancing.
    "moe_debug": _llama3(
        *(64, 3, 8, 4),
        vocab_size=BYTES,
        multiple_of=32,
        moe_num_experts=8,
        moe_top_k=3,
        moe_hidden_dim=48,
        moe_num_shared_experts=1,
        moe_n_dense_layers=1,
        moe_route_norm=True,
        moe_route_scale=2.5,
        moe_score_before_experts=False,
        moe_sequence_loss_coeff=1e-2,
    ),
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1
    "Mixtral-8x7B": Llama3Config(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        vocab_size=32000,
        rope_theta=1000000.0,
        rope_scaling_factor=1.0,
        moe_num_experts=8,
        moe_top_k=2,
        moe_hidden_dim=14336,
        moe_score_func="softmax",
        moe_route_norm=True,
        moe_score_before_experts=False,
        moe_load_balance_coeff=None,
    ),
}
