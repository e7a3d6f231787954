"""On a rank: whether what autograd saves for the backward pass is still the same there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from titanlite.tools.verify.caller_lines import FOREIGN, line_of_caller
from titanlite.tools.verify.events import Events
from titanlite.tools.verify.program.values import MOST_BYTES, MOST_ELEMENTS


@contextlib.contextmanager
def watching_saved(kept: Events) -> Iterator[None]:
    """Inside, `kept.values` notes the lines of which the backward pass reads other values.

    Autograd sees no change by a collective, or through an alias that it does not know. One process
    must be watched, too: with hooks no operator `detach` is noted where a result is saved.
    """

    num_bytes = 0

    def pack(tensor: Tensor) -> tuple[Tensor, Tensor | None, str]:
        nonlocal num_bytes
        # Buffers may change, and parameters may be freed in between.
        is_other = type(tensor) is not Tensor or not tensor.requires_grad or tensor.is_leaf
        if is_other or tensor.numel() > MOST_ELEMENTS or num_bytes > MOST_BYTES:
            return tensor, None, ""
        num_bytes += tensor.numel() * tensor.element_size()
        with kept.own_code():
            return tensor, tensor.detach().clone(), line_of_caller(FOREIGN)

    def unpack(saved: Any) -> Tensor:
        tensor, before, line = saved
        with kept.own_code():
            if line and tensor.untyped_storage().nbytes() and _has_changed(tensor, before):
                kept.values.overwritten[line] = None
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield


def _has_changed(tensor: Tensor, before: Tensor) -> bool:
    # What was never written, as where a pipeline learns shapes, may be NaN.
    return bool(((tensor != before) & (before == before)).any())
