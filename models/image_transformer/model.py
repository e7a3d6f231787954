"""An image transformer in plain PyTorch, which predicts the next pixel value.

    tokens -> ImageEmbeddings -> num_layers x TransformerBlock -> RMSNorm -> output -> logits

Nothing here depends on ranks; plan.py defines the sharding. Two choices make sharding easy.
Activations in blocks have the sequence first, as in Megatron-LM, so all-gathering a sequence needs
no copy. The number of heads is inferred from the tensor, so a rank with some of the heads runs the
same code.

Shape suffixes: B images, T tokens, D model width, H query heads, K key/value heads, E head width,
F feed-forward width, V vocabulary; a local shard of a dimension has the same letter.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.image_transformer.config import ImageTransformerConfig
from titanlite.modules.attention import CausalAttention, KeyValueCache
from titanlite.modules.dropout import TokenDropout


class ImageTransformer(nn.Module):
    """Autoregressive transformer over the pixels of an image.

    The pixels are in planar order, channel -> row -> column. The output layer is initialized to
    zero (`config.zero_init_output`), so the first loss is ln(vocab_size). A pipeline stage has only
    some of the layers, and None for embeddings, norm or output that other stages hold.
    """

    embeddings: "ImageEmbeddings | None"
    norm: nn.RMSNorm | None
    output: nn.Linear | None

    def __init__(self, config: ImageTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = ImageEmbeddings(
            config.vocab_size,
            config.dim,
            height=config.image_height,
            width=config.image_width,
            channels=config.image_channels,
        )
        self.embedding_dropout = TokenDropout(config.dropout)
        # A dictionary, so that a block has the same name in every pipeline stage.
        self.layers = nn.ModuleDict(
            {str(index): TransformerBlock(config) for index in range(config.num_layers)}
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        token_numbers: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] for the pixel after each of `tokens_BT` (integers in [0, V)).

        `positions` [T] or [B, T] are the indices of the tokens in the image, by default 0 to T-1.
        `token_numbers` [B, T] are required by dropout and otherwise not used. With a `cache`, the
        tokens follow those in the cache. A stage without embeddings takes activations [T, B, D],
        and a stage without output layer returns them.
        """
        if cache is not None:
            positions = torch.arange(tokens_BT.size(1), device=tokens_BT.device) + cache.length
        numbers_TB = None
        if self.config.dropout > 0.0 and token_numbers is not None:
            numbers_TB = token_numbers.transpose(0, 1)
        x_TBD = tokens_BT
        if self.embeddings is not None:
            x_BTD = self.embeddings(tokens_BT, positions=positions)
            x_TBD = x_BTD.transpose(0, 1).contiguous()
            x_TBD = self.embedding_dropout(x_TBD, numbers_TB)
        for layer in self.layers.values():
            x_TBD = layer(x_TBD, cache=cache, numbers_TB=numbers_TB)
        if cache is not None:
            cache.length += tokens_BT.size(1)
        if self.norm is not None:
            x_TBD = self.norm(x_TBD)
        if self.output is None:
            return x_TBD
        # Copy even the logits of a single image: FSDP2 warns if a module returns a view.
        return self.output(x_TBD).transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def make_cache(self, seq_len: int) -> KeyValueCache:
        """An empty cache for sequences of up to `seq_len` tokens."""
        return KeyValueCache(seq_len)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Initialize the whole parameter called `name` in place.

        Norms are one. Weights are normal with standard deviation 0.02; for the two projections that
        add to the residual stream, times 1/sqrt(2 * num_layers) (GPT-2, section 2.3).
        """
        if "norm" in name:
            parameter.fill_(1.0)
        elif name == "output.weight" and self.config.zero_init_output:
            parameter.zero_()
        else:
            std = 0.02
            if name.endswith(("wo.weight", "w2.weight")):
                std /= math.sqrt(2 * self.config.num_layers)
            parameter.normal_(0.0, std, generator=generator)


class ImageEmbeddings(nn.Module):
    """The sum of four learned embeddings: of the pixel's value, row, column and channel."""

    def __init__(
        self, vocab_size: int, dim: int, *, height: int = 32, width: int = 32, channels: int = 3
    ) -> None:
        super().__init__()
        self.height, self.width, self.channels = height, width, channels
        self.tok_emb = nn.Embedding(vocab_size, dim)
        self.row_emb = nn.Embedding(height, dim)
        self.col_emb = nn.Embedding(width, dim)
        self.chan_emb = nn.Embedding(channels, dim)

    def forward(
        self,
        tokens_BT: Tensor,
        device: torch.device | str | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Embeddings [B, T, D] of pixel values `tokens_BT` at `positions` [T] or [B, T].

        By default, the positions are 0 to T-1, on `device` or else the device of the tokens.
        """
        if positions is None:
            positions = torch.arange(tokens_BT.size(1), device=device or tokens_BT.device)
        # With a batch dimension, all embeddings have the sequence in the same dimension.
        positions_BT = positions if positions.ndim == 2 else positions[None]
        channels_BT = positions_BT // (self.height * self.width)
        rows_BT = positions_BT % (self.height * self.width) // self.width
        columns_BT = positions_BT % self.width
        return (
            self.tok_emb(tokens_BT)
            + self.row_emb(rows_BT)
            + self.col_emb(columns_BT)
            + self.chan_emb(channels_BT)
        )


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ImageTransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = SelfAttention(config)
        self.attention_dropout = TokenDropout(config.dropout)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.ffn_hidden_dim)
        self.ffn_dropout = TokenDropout(config.dropout)

    def forward(
        self, x_TBD: Tensor, cache: KeyValueCache | None = None, numbers_TB: Tensor | None = None
    ) -> Tensor:
        a_TBD = self.attention(self.attention_norm(x_TBD), cache=cache)
        h_TBD = x_TBD + self.attention_dropout(a_TBD, numbers_TB)
        f_TBD = self.feed_forward(self.ffn_norm(h_TBD))
        return h_TBD + self.ffn_dropout(f_TBD, numbers_TB)


class SelfAttention(nn.Module):
    """Causal self-attention; with fewer key/value heads than query heads, GQA."""

    def __init__(self, config: ImageTransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.inner = CausalAttention()

    def forward(self, x_TBD: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        q_BHTE = self._heads(self.wq(x_TBD))
        k_BKTE = self._heads(self.wk(x_TBD))
        v_BKTE = self._heads(self.wv(x_TBD))
        if cache is not None:
            k_BKTE, v_BKTE = cache.extend(self, k_BKTE, v_BKTE)
        o_BHTE = self.inner(q_BHTE, k_BKTE, v_BKTE)
        return self.wo(o_BHTE.permute(2, 0, 1, 3).flatten(2))

    def _heads(self, x_TBD: Tensor) -> Tensor:
        return x_TBD.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_TBD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_TBD)) * self.w3(x_TBD))
