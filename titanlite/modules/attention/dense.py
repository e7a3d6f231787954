"""Causal attention of a model on one rank: the module that context parallelism replaces.

Shapes: B batch, H query heads, K key/value heads (H a multiple of K), T queries, S keys, E head
size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Scaled dot-product attention of each query to the keys up to its own position."""

    def forward(
        self, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, documents: Tensor | None = None
    ) -> Tensor:
        """Attention output [B, H, T, E]; the queries are the last T of the S positions.

        `documents` [B, S] are the numbers of the keys' documents within their sequence. A query
        then attends only to keys of its own document.
        """
        return attend(q_BHTE, k_BKSE, v_BKSE, documents=documents)


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Attention of one rank, causal or not, within documents [B, S] if these are given.

    If there are fewer queries than keys, the queries are the last positions.
    """
    num_queries, num_keys = q_BHTE.size(2), k_BKSE.size(2)
    mask = None
    # A single query is the last position and attends to every key.
    if is_causal and (documents is not None or num_queries not in (num_keys, 1)):
        earlier = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHTE.device)
        mask = earlier.tril(num_keys - num_queries)
    if documents is not None:
        mask_BTS = same_document(documents[:, -num_queries:], documents)
        mask = mask_BTS if mask is None else mask_BTS & mask
    repeats = q_BHTE.size(1) // k_BKSE.size(1) if q_BHTE.is_cuda else 1
    if repeats > 1 and (mask is not None or q_BHTE.dtype == torch.float32):
        # The kernel for masks and float32 takes no grouped heads; the next one keeps all scores.
        k_BKSE, v_BKSE = (x.repeat_interleave(repeats, 1) for x in (k_BKSE, v_BKSE))
    return F.scaled_dot_product_attention(
        q_BHTE,
        k_BKSE,
        v_BKSE,
        attn_mask=mask,
        is_causal=is_causal and mask is None and num_queries == num_keys,
        scale=scale,
        enable_gqa=q_BHTE.size(1) != k_BKSE.size(1),
    )


def same_document(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """A mask [B, 1, T, S], true where query [B, T] and key [B, S] have the same document."""
    return of_queries[:, None, :, None] == of_keys[:, None, None, :]


class KeyValueCache:
    """The keys and values of earlier tokens, so that sampling computes each token once."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.length = 0
        self._keys_values: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._documents: Tensor | None = None

    def keep_first(self, num_sequences: int) -> None:
        """Forget all but the first `num_sequences`."""
        self._keys_values = {
            layer: (keys[:num_sequences], values[:num_sequences])
            for layer, (keys, values) in self._keys_values.items()
        }
        if self._documents is not None:
            self._documents = self._documents[:num_sequences]

    def extend_documents(self, documents_BT: Tensor) -> Tensor:
        """Append the new tokens' document numbers; return those of all tokens, [B, length].

        Call it before the layers. Either every call of the model has documents, or none.
        """
        if self._documents is not None:
            documents_BT = torch.cat([self._documents, documents_BT], dim=1)
        self._documents = documents_BT
        return documents_BT

    def extend(self, layer: nn.Module, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values; return all of its own, [B, K, length, E] each."""
        if layer not in self._keys_values:
            B, K, _, E = k_BKTE.shape
            self._keys_values[layer] = (
                k_BKTE.new_empty(B, K, self.seq_len, E),
                v_BKTE.new_empty(B, K, self.seq_len, E),
            )
        keys, values = self._keys_values[layer]
        end = self.length + k_BKTE.size(2)
        keys[:, :, self.length : end] = k_BKTE
        values[:, :, self.length : end] = v_BKTE
        return keys[:, :, :end], values[:, :, :end]
