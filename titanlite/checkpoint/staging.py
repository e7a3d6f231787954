"""The copy in memory that a save in the background writes from, while training changes the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from titanlite.checkpoint.storage import Piece


class Copies(AsyncStager):
    """Copies pieces into CPU memory: once more each time, or where `lasting` into the same.

    A lasting copy costs its memory all the time and saves allocating it; `pinned`, the GPU writes
    it at full speed. There is one at a time: a save must be done before the next is copied.
    """

    _synchronize_after_execute = False

    def __init__(self, *, lasting: bool, pinned: bool) -> None:
        self._lasting, self._pinned = lasting, lasting and pinned
        self._kept: dict[str, Tensor] = {}

    def stage(self, pieces: Any) -> Any:
        """The same pieces, of copies."""
        copies = {name: self._copy(name, piece) for name, piece in pieces.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def synchronize_staging(self) -> None:
        """Nothing: the copy is whole when `stage` returns."""

    def close(self) -> None:
        """Give the memory back."""
        self._kept.clear()

    def _copy(self, name: str, piece: Piece) -> Piece:
        kept = self._kept.get(name)
        if kept is None or kept.shape != piece.local.shape:
            kept = torch.empty(piece.local.shape, dtype=piece.local.dtype, pin_memory=self._pinned)
            if self._lasting:
                self._kept[name] = kept
        kept.copy_(piece.local, non_blocking=True)
        return Piece(kept, piece.shape, piece.offsets)
