"""What a world asks of the watchdog of its rank, for a rank that has none."""

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


class Unwatched:
    """The watchdog of a rank that waits for no other; `describe_place` is for reports alone."""

    timeout_seconds = math.inf

    def __init__(self, describe_place: Callable[[int], str] = lambda rank: "") -> None:
        self.describe_place = describe_place
        """Gives the mesh coordinates of any rank."""

    def set_timeout(self, seconds: float, key: str = "comm.train_timeout_seconds") -> None:
        """Set the timeout of a wait; `key` is the name of this limit in a report."""

    def allowing(self, seconds: float, key: str) -> AbstractContextManager[None]:
        """Inside, another timeout. The caller must also set it on the process groups used there."""
        return contextlib.nullcontext()

    def explaining(self) -> AbstractContextManager[None]:
        """Inside, a communication error is reported at once.

        That is before outer contexts are closed, which may itself take waiting for other ranks.
        """
        return contextlib.nullcontext()

    def name_groups(self, axes: Mapping[str, str]) -> None:
        """Set the axis of each process group, for reports."""

    def counting_memory(self, device_type: str) -> AbstractContextManager[None]:
        """Inside, `peak_bytes` is counted, for a rank that is a thread."""
        return contextlib.nullcontext()

    def peak_bytes(self, device: torch.device) -> int | None:
        """The most that torch had allocated for this rank at a time; None: not counted."""
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

    def patched(
        self, patch: Callable[[], AbstractContextManager[Any]]
    ) -> AbstractContextManager[Any]:
        """The context of `patch`, which changes code; ranks that are threads enter it once."""
        return patch()
