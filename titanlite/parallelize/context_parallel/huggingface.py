"""Ring attention as an attention implementation of transformers, for a model and loop by hand.

transformers calls attention by a name (`attn_implementation`) and makes its mask by the same name.
Ring attention is causal by the tokens' layout, and takes documents but no mask. That matters: under
a layout such as headtail, a rank's positions are not consecutive, and transformers' own masks take
each jump for the start of another document (`find_packed_sequence_indices`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.errors import TitanliteError
from titanlite.modules.attention.layout import Layout
from titanlite.parallelize.context_parallel.ring import RingAttention

Attend = Callable[..., tuple[Tensor, None]]


def register_ring_attention(
    mesh: DeviceMesh | dist.ProcessGroup,
    layout: str | Layout = "headtail",
    rotate_method: str = "alltoall",
    *,
    name: str = "titanlite_ring",
) -> str:
    """Register causal ring attention over the 1-D `mesh` in transformers; returns its name.

    Give the name to `model.set_attn_implementation`. Then every rank calls the model with its own
    tokens, `layout.shard(tokens, 1, rank)`, and `position_ids=layout.positions(rank,
    seq_len)[None]`, where layout is `make_layout("headtail", mesh.size())`. For packed documents,
    also pass `documents=` [B, T], this rank's shard of the index of each token's document, and
    position_ids that start at 0 in each document. Attention may be grouped-query.

    The model raises TitanliteError for positions that are not those of `layout.positions`, without
    `documents`; for a padding mask; and for attention that is not causal or has dropout.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    ring = RingAttention(mesh, layout, rotate_method)
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    rank = dist.get_rank(group)

    def attend(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        scaling: float | None = None,
        documents: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        keys = scoring(type(module).__name__, options)
        seq_len = q.size(2) * ring.layout.num_ranks
        if mask is not None:
            raise TitanliteError("ring attention has no masks, but there is a mask; remove it")
        is_first = getattr(module, "layer_idx", None) == 0 and documents is None
        if is_first and not torch.compiler.is_compiling():
            _check_positions(options.get("position_ids"), ring.layout.positions(rank, seq_len))
        return ring(q, k, v, True, scaling, documents=documents, **keys).transpose(1, 2), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, no_mask)
    return name


def no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """The mask of an attention that is causal by itself; raises TitanliteError for padding."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise TitanliteError(
            "attention_mask: this attention has no mask for padding; pass no attention_mask, and "
            "mask the padding's targets by -100"
        )


def scoring(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The window, softcap and sinks that transformers gives an attention.

    Raises TitanliteError for another option that changes the result.
    """
    for option in ("position_bias", "head_mask"):
        if options.get(option) is not None:
            raise TitanliteError(f"{name} has attention with {option}, which is not supported")
    if options.get("dropout") or options.get("is_causal") is False:
        what = "dropout" if options.get("dropout") else "no causal mask"
        raise TitanliteError(f"{name} has attention with {what}, which is not supported")
    given = {"window": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}
    return {own: options.get(theirs) for own, theirs in given.items()}


def _check_positions(given: Any, own: Tensor) -> None:
    if isinstance(given, Tensor) and not bool((given.cpu() == own).all()):
        raise TitanliteError(
            "position_ids are not those of this rank's tokens in the layout; pass "
            "layout.positions(rank, seq_len)[None], and for packed documents also `documents`"
        )
