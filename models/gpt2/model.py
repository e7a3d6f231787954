"""GPT-2 in plain PyTorch.

    tokens -> tok_embeddings + pos_embeddings -> n_layers x TransformerBlock -> LayerNorm -> output

The output layer's weight is the embedding table. Nothing here depends on ranks; plan.py defines the
sharding. Activations in blocks have the sequence first, so all-gathering a sequence needs no copy.
The number of heads is inferred from the tensor, so a rank with some of the heads runs the same
code; for the same reason q, k and v have a projection each.

Shape suffixes: B sequences, T tokens, D model width, H heads, E head width, V vocabulary; a local
shard of a dimension has the same letter.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.gpt2.config import GPT2Config
from titanlite.modules.attention import CausalAttention, KeyValueCache
from titanlite.modules.dropout import TokenDropout


class GPT2(nn.Module):
    """Autoregressive transformer with learned positions, LayerNorms, GELU and biases.

    A pipeline stage has only some of the layers, and None for tok_embeddings, pos_embeddings, norm
    or output that other stages hold.
    """

    tok_embeddings: nn.Embedding | None
    pos_embeddings: nn.Embedding | None
    norm: nn.LayerNorm | None
    output: nn.Linear | None

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embeddings = nn.Embedding(config.max_seq_len, config.dim)
        self.embedding_dropout = TokenDropout(config.dropout)
        # A dictionary, so that a block has the same name in every pipeline stage.
        self.layers = nn.ModuleDict(
            {str(index): TransformerBlock(config) for index in range(config.n_layers)}
        )
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        token_numbers: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] for the token after each of `tokens_BT` (integers in [0, V)).

        `positions` [T] or [B, T] are the indices of the tokens in their sequence or document, by
        default 0 to T-1. With `documents` [B, T], the number of each token's document within its
        sequence, no token attends to another document. `token_numbers` [B, T] are required by
        dropout and otherwise not used. With a `cache`, the tokens follow those in the cache. A
        stage without embeddings takes activations [T, B, D], and a stage without output layer
        returns them.
        """
        if positions is None:
            positions = torch.arange(tokens_BT.size(1), device=tokens_BT.device)
            if cache is not None:
                positions = positions + cache.length
        if cache is not None and documents is not None:
            documents = cache.extend_documents(documents)
        numbers_TB = None
        if self.config.dropout > 0.0 and token_numbers is not None:
            numbers_TB = token_numbers.transpose(0, 1)
        x_TBD = tokens_BT
        if self.tok_embeddings is not None:
            x_TBD = self.tok_embeddings(tokens_BT.transpose(0, 1))
        if self.pos_embeddings is not None:
            positions_BT = positions if positions.ndim == 2 else positions[None]
            x_TBD = x_TBD + self.pos_embeddings(positions_BT.transpose(0, 1))
            x_TBD = self.embedding_dropout(x_TBD, numbers_TB)
        for layer in self.layers.values():
            x_TBD = layer(x_TBD, documents, cache=cache, numbers_TB=numbers_TB)
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
        """Initialize the whole parameter called `name` in place.

        Norms are one and biases zero. Weights are normal with standard deviation 0.02, positions
        0.01; the two projections that add to the residual stream have 0.02/sqrt(2 n_layers).
        Source: section 2.3 of the paper, and https://github.com/openai/gpt-2/blob/master/src/model.py
        """
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            std = 0.01 if name == "pos_embeddings.weight" else 0.02
            if name.endswith(("wo.weight", "w2.weight")):
                std /= math.sqrt(2 * self.config.n_layers)
            parameter.normal_(0.0, std, generator=generator)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.attention_dropout = TokenDropout(config.dropout)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.ffn_hidden_dim)
        self.ffn_dropout = TokenDropout(config.dropout)

    def forward(
        self,
        x_TBD: Tensor,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        numbers_TB: Tensor | None = None,
    ) -> Tensor:
        a_TBD = self.attention(self.attention_norm(x_TBD), documents, cache=cache)
        h_TBD = x_TBD + self.attention_dropout(a_TBD, numbers_TB)
        f_TBD = self.feed_forward(self.ffn_norm(h_TBD))
        return h_TBD + self.ffn_dropout(f_TBD, numbers_TB)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim)
        self.wk = nn.Linear(config.dim, config.dim)
        self.wv = nn.Linear(config.dim, config.dim)
        self.wo = nn.Linear(config.dim, config.dim)
        self.inner = CausalAttention()

    def forward(
        self, x_TBD: Tensor, documents: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        q_BHTE, k_BHTE, v_BHTE = (
            layer(x_TBD).unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)
            for layer in (self.wq, self.wk, self.wv)
        )
        if cache is not None:
            k_BHTE, v_BHTE = cache.extend(self, k_BHTE, v_BHTE)
        o_BHTE = self.inner(q_BHTE, k_BHTE, v_BHTE, documents=documents)
        return self.wo(o_BHTE.permute(2, 0, 1, 3).flatten(2))


class FeedForward(nn.Module):
    """w2(gelu(w1 x)), with GELU's tanh approximation (arXiv 1606.08415)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.w2 = nn.Linear(hidden_dim, dim)

    def forward(self, x_TBD: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x_TBD), approximate="tanh"))
