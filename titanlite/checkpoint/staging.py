"""Staging: the copy in CPU memory from which a background save writes while training goes on."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from titanlite.checkpoint.storage import Piece


class CpuStager(AsyncStager):
    """Copies pieces to CPU memory: newly allocated for each save, or reused if `lasting`.

    A lasting copy always occupies its memory, but is allocated only once. If the pieces are on a
    GPU, `device`, it is pinned, so that they are copied at full speed. There is one copy at a time:
    a save must finish before the next one is copied.
    """

    _synchronize_after_execute = False

    def __init__(self, device: torch.device, *, lasting: bool) -> None:
        self._device, self._lasting = device, lasting
        self._pinned = lasting and device.type == "cuda"
        self._kept: dict[str, Tensor] = {}

    def stage(self, pieces: Any) -> Any:
        """The same pieces with copied tensors."""
        copies = {name: self._copy(name, piece) for name, piece in pieces.items()}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies

    def synchronize_staging(self) -> None:
        """Does nothing: the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Free the memory."""
        self._kept.clear()

    def _copy(self, name: str, piece: Piece) -> Piece:
        kept = self._kept.get(name)
        if kept is None or kept.shape != piece.local.shape:
            kept = torch.empty(piece.local.shape, dtype=piece.local.dtype, pin_memory=self._pinned)
            if self._lasting:
                self._kept[name] = kept
        kept.copy_(piece.local, non_blocking=True)
        return Piece(kept, piece.shape, piece.offsets)
