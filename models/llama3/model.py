"""Llama 3 in plain PyTorch.

    tokens -> tok_embeddings -> n_layers x TransformerBlock -> RMSNorm -> output -> logits

Nothing here depends on ranks; plan.py defines the sharding. Modules have TorchTitan's names, so
its checkpoints fit. Two choices make sharding easy: activations in blocks have the sequence first,
so all-gathering a sequence needs no copy, and the number of heads is inferred from the tensor, so a
rank with some of the heads runs the same code.

Shape suffixes: B sequences, T tokens, D model width, H query heads, K key/value heads, E head
width, V vocabulary; a local shard of a dimension has the same letter.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.llama3.config import Llama3Config
from titanlite.modules.attention import CausalAttention, KeyValueCache
from titanlite.modules.experts import ExpertLayer


class Llama3(nn.Module):
    """Autoregressive transformer with rotary positions, grouped-query attention and SwiGLU.

    A pipeline stage has only some of the layers, and None for tok_embeddings, norm or output that
    other stages hold.
    """

    tok_embeddings: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: nn.Linear | None

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        # A dictionary, so that a block has the same name in every pipeline stage.
        self.layers = nn.ModuleDict(
            {str(index): TransformerBlock(config, index) for index in range(config.n_layers)}
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Logits [B, T, V] for the token after each of `tokens_BT` (integers in [0, V)).

        `positions` [T] or [B, T] are the indices of the tokens in their sequence or document, by
        default 0 to T-1. With `documents` [B, T], the number of each token's document within its
        sequence, no token attends to another document. With a `cache`, the tokens follow those in
        the cache. A stage without embeddings takes activations [T, B, D], and a stage without
        output layer returns them.
        """
        if positions is None:
            positions = torch.arange(tokens_BT.size(1), device=tokens_BT.device)
            if cache is not None:
                positions = positions + cache.length
        if cache is not None and documents is not None:
            documents = cache.extend_documents(documents)
        x_TBD = tokens_BT
        if self.tok_embeddings is not None:
            x_TBD = self.tok_embeddings(tokens_BT.transpose(0, 1))
        for layer in self.layers.values():
            x_TBD = layer(x_TBD, positions, documents, cache=cache)
        if cache is not None:
            cache.length += tokens_BT.size(1)
        if self.norm is not None:
            x_TBD = self.norm(x_TBD)
        if self.output is None:
            return x_TBD
        # Transposed before the product, which is narrower here than after it.
        return self.output(x_TBD.transpose(0, 1))

    def make_cache(self, seq_len: int) -> KeyValueCache:
        """An empty cache for sequences of up to `seq_len` tokens."""
        return KeyValueCache(seq_len)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Initialize the whole parameter called `name` in place, as TorchTitan v0.2.2 does.

        Norms are one and the embedding table is standard normal. Weights are normal with standard
        deviation 0.02; wo, w2, w3 and the router's gate of layer i with 0.02/sqrt(2(i + 1)), or
        0.02/sqrt(2 n_layers) without `depth_init`. The output layer has dim^-0.5, truncated at
        three times that; so has a tied table, which would otherwise give logits of standard
        deviation sqrt(dim).
        """
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if "norm" in kind:
            parameter.fill_(1.0)
        elif kind == "output" or (self.config.tie_embeddings and kind == "tok_embeddings"):
            std = self.config.dim**-0.5
            bounds = {"a": -3 * std, "b": 3 * std}
            nn.init.trunc_normal_(parameter, 0.0, std, **bounds, generator=generator)
        elif kind == "tok_embeddings":
            parameter.normal_(0.0, 1.0, generator=generator)
        else:
            std = 0.02
            if kind in ("wo", "w2", "w3", "gate"):
                index = int(name.split(".")[1])
                depth = index + 1 if self.config.depth_init else self.config.n_layers
                std /= math.sqrt(2 * depth)
            nn.init.trunc_normal_(parameter, 0.0, std, generator=generator)

    def init_buffers(self) -> None:
        """Set the rotary frequencies and the balancing biases of every block."""
        for module in self.modules():
            if isinstance(module, RotaryEmbedding | ExpertLayer):
                module.init_buffers()


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream.

    The feed-forward is `feed_forward`, or `moe` in a block with experts.
    """

    def __init__(self, config: Llama3Config, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        if config.has_experts(index):
            self.moe = make_expert_layer(config)
        else:
            self.feed_forward = FeedForward(config.dim, config.ffn_hidden_dim)

    def forward(
        self,
        x_TBD: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        a_TBD = self.attention(self.attention_norm(x_TBD), positions, documents, cache=cache)
        h_TBD = x_TBD + a_TBD
        if hasattr(self, "moe"):
            return h_TBD + self.moe(self.ffn_norm(h_TBD), positions)
        return h_TBD + self.feed_forward(self.ffn_norm(h_TBD))


class Attention(nn.Module):
    """Causal self-attention with rotary positions; with fewer key/value heads, GQA."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = RotaryEmbedding(config)
        self.inner = CausalAttention()

    def forward(
        self,
        x_TBD: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        q_BHTE, k_BKTE, v_BKTE = (
            layer(x_TBD).unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)
            for layer in (self.wq, self.wk, self.wv)
        )
        q_BHTE, k_BKTE = self.rotary(q_BHTE, k_BKTE, positions)
        if cache is not None:
            k_BKTE, v_BKTE = cache.extend(self, k_BKTE, v_BKTE)
        o_BHTE = self.inner(q_BHTE, k_BKTE, v_BKTE, documents=documents)
        return self.wo(o_BHTE.permute(2, 0, 1, 3).flatten(2))


class RotaryEmbedding(nn.Module):
    """Rotates pairs of a head's features by angles proportional to the position.

    Features 2i and 2i + 1 are a pair (RoFormer, arXiv 2104.09864, equation 34), as in Meta's
    weights; Hugging Face's weights pair i with E/2 + i. The angles are computed from the positions
    in each call, in float32 or better, so there is no table whose length limits a sequence.
    """

    frequencies: Tensor

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", torch.empty(config.head_dim // 2), persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Set the angles per position, [E / 2] in radians; on "meta" there is nothing to set."""
        if not self.frequencies.is_meta:
            self.frequencies.copy_(rotary_frequencies(self.config))

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k rotated by the angles of `positions` [T] or [B, T]."""
        angles = positions.unsqueeze(-1) * self.frequencies
        if positions.ndim == 2:
            angles = angles.unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        return _rotate(q_BHTE, cos, sin), _rotate(k_BKTE, cos, sin)


def _rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BHTE.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = [first * cos - second * sin, first * sin + second * cos]
    return torch.stack(pairs, -1).flatten(-2).to(x_BHTE.dtype)


def rotary_frequencies(config: Llama3Config) -> Tensor:
    """The angle per position of each pair of features, float64 [E / 2].

    theta^(-2i/E), changed by Llama 3.1's scaling: a wavelength above the original length /
    low_freq_factor is stretched by the scaling factor, one below the original length /
    high_freq_factor is kept, and one between changes linearly in the number of periods that fit
    into the original length.
    Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    periods = config.rope_scaling_original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_TBD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_TBD)) * self.w3(x_TBD))


def make_expert_layer(config: Llama3Config) -> ExpertLayer:
    """The feed-forward of a block with experts."""
    shared = None
    if config.moe_num_shared_experts:
        width = config.moe_num_shared_experts * config.expert_hidden_dim
        shared = FeedForward(config.dim, width)
    return ExpertLayer(
        config.dim,
        config.expert_hidden_dim,
        config.moe_num_experts,
        config.moe_top_k,
        shared_experts=shared,
        score_func=config.moe_score_func,
        normalize=config.moe_route_norm,
        scale=config.moe_route_scale,
        score_first=config.moe_score_before_experts,
        bias_step=config.moe_load_balance_coeff,
        loss_factor=config.moe_sequence_loss_coeff,
        capacity_factor=config.moe_capacity_factor,
    )
