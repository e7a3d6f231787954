"""Causal attention of a model on one rank: the module that context parallelism replaces.

Shapes: B batch, H query heads, K key/value heads (H a multiple of K), T queries, S keys, E head
size.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.modules.attention.documents import known_of, same_document, takes_rows
from titanlite.modules.attention.kernels import Scoring, aten, for_flash, heads_first


class CausalAttention(nn.Module):
    """Scaled dot-product attention of each query to the keys up to its own position."""

    def forward(
        self,
        q_BHTE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        scale: float | None = None,
        *,
        documents: Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention output [B, H, T, E]; the queries are the last T of the S positions.

        `documents` [B, S] are the numbers of the keys' documents within their sequence. A query
        then attends only to keys of its own document; with a `window`, only to the last `window`
        keys up to its own. `softcap` replaces a score s by softcap x tanh(s / softcap). `sinks`
        [H] are scores of a key without a value, which every query attends to.
        """
        keys: Any = {"window": window, "softcap": softcap, "sinks": sinks}
        return attend(q_BHTE, k_BKSE, v_BKSE, scale=scale, documents=documents, **keys)


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one rank, causal or not, within documents [B, S] if these are given.

    If there are fewer queries than keys, the queries are the last positions. A `window` is causal.
    With `softcap` or `sinks` (see CausalAttention), all scores are in memory at once.
    """
    num_queries, num_keys = q_BHTE.size(2), k_BKSE.size(2)
    if window is not None and window >= num_keys:
        window = None
    known = None if documents is None or num_queries != num_keys else known_of(documents)
    by_scores = softcap is not None or sinks is not None
    rows = None if known is None else known.rows
    is_whole = window and documents is None and num_queries == num_keys
    is_free = rows is not None or (is_whole and takes_rows(q_BHTE.device))
    if is_free and not by_scores and _has_kernel(q_BHTE, v_BKSE):
        how = Scoring(is_causal or bool(window), scale or q_BHTE.size(3) ** -0.5)
        how = how._replace(reach=window - 1 if window else None, rows=rows)
        inputs, options = for_flash(how, (q_BHTE, k_BKSE, v_BKSE), q_BHTE, k_BKSE)
        out, *_ = aten._flash_attention_forward(*inputs, 0.0, how.causal, False, **options)
        return heads_first(out, q_BHTE)
    mask = None
    # A single query is the last position and attends to every key.
    is_cut = is_causal and (by_scores or num_queries not in (num_keys, 1))
    if documents is not None or window or is_cut:
        make = partial(_mask, q_BHTE, num_keys, is_causal, documents, window)
        is_shared = known is not None and not torch.compiler.is_compiling() and not by_scores
        kind = (is_causal, window, q_BHTE.dtype)
        mask = known.bias(kind, make) if known and is_shared else make()
    if by_scores:
        scale = q_BHTE.size(3) ** -0.5 if scale is None else scale
        return _attend_by_scores(q_BHTE, k_BKSE, v_BKSE, mask, scale, softcap, sinks)
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


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether a kernel for sequences in a row takes these, if the device has one."""
    return q.dtype.itemsize == 2 and q.size(3) in range(8, 257, 8) and v.size(3) == q.size(3)


def _attend_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by products and a softmax, in at least float32, for what no fused kernel takes."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(dtype) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : k.size(2)].to(v.dtype) @ v


def _mask(
    q: Tensor, num_keys: int, is_causal: bool, documents: Tensor | None, window: int | None
) -> Tensor:
    """The mask of the last queries, true where they attend."""
    mask = torch.ones(q.size(2), num_keys, dtype=torch.bool, device=q.device)
    last = num_keys - q.size(2)
    if is_causal or window:
        mask = mask.tril(last)
    if window:
        mask = mask.triu(last + 1 - window)
    if documents is not None:
        mask = mask & same_document(documents[:, -q.size(2) :], documents)
    return mask


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
