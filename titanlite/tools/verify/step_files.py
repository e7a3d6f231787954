"""On a rank: the files of the reference's tensors, one per step, which every rank maps into memory.

A rank compares its own shards with its slices of these tensors. So nothing is gathered, every
replica is checked, and the ranks on which something differs are known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.ranks.temporary import save_temporary

# The time between two looks for a file that another process is to write.
WAIT_SECONDS = 0.005


@dataclass(frozen=True)
class _Packed:
    """Named tensors, joined by dtype: reading a file takes time for each tensor in it."""

    shapes: dict[str, tuple[torch.dtype, torch.Size]]
    joined: dict[torch.dtype, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _Packed:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors.values():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        return cls(
            {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
            {dtype: torch.cat(parts) for dtype, parts in by_dtype.items()},
        )

    def tensors(self) -> dict[str, Tensor]:
        parts = {
            dtype: iter(
                joined.split([shape.numel() for own, shape in self.shapes.values() if own == dtype])
            )
            for dtype, joined in self.joined.items()
        }
        return {
            name: next(parts[dtype]).view(shape) for name, (dtype, shape) in self.shapes.items()
        }


def _is_named_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, Tensor) for one in value.values())


def store(record: Mapping[str, Any], folder: str, step: int) -> None:
    """Write the reference's record of a step. The file appears when it is complete."""
    file = _step_file(folder, step)
    packed = {
        key: _Packed.of(value) if _is_named_tensors(value) else value
        for key, value in record.items()
    }
    save_temporary(packed, file.with_suffix(".part"))
    os.replace(file.with_suffix(".part"), file)


def wait_for(file: Path) -> None:
    """Wait until `file` exists. If its writer fails, the launcher of both ends this process."""
    while not file.exists():
        time.sleep(WAIT_SECONDS)


def load(folder: str, step: int) -> Any:
    """The reference's record of a step, its tensors mapped from the file.

    Waits for the reference if it has not completed the step.
    """
    wait_for(_step_file(folder, step))
    # This program wrote the file, in a folder that only its user can write to. torch's restricted
    # unpickler is written in Python and takes a tenth of a small verification.
    record = torch.load(_step_file(folder, step), mmap=True, weights_only=False)
    return {
        key: value.tensors() if isinstance(value, _Packed) else value
        for key, value in record.items()
    }


def _step_file(folder: str, step: int) -> Path:
    """The file of the reference's record of `step`; step 0 is the start."""
    return Path(folder) / f"step{step}.pt"
