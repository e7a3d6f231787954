"""Whether views of memory still have in them what they had, when a step reads them again.

A buffer that several layers share is written through one view of it, and read through another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from titanlite.tools.verify.caller_lines import FOREIGN, line_of_caller

# Larger contents are not kept.
MOST_ELEMENTS, MOST_BYTES = 1 << 20, 1 << 28

Region = tuple[int, int]
"""Where elements begin in a storage, and their number."""
Write = tuple[WeakIdRef, Region, str]
"""The tensor that a line writes to, and where that is; and the line."""


@dataclass
class _View:
    source: Tensor
    num_writes: int
    """How many writes to the storage there were when its content was known last."""
    content: Tensor | None = None


class Contents:
    """The contents of the views that a step makes, if what they are of is written to in it."""

    def __init__(self) -> None:
        self.changed: dict[tuple[str, str], None] = {}
        """Lines that read what was there no more, with the lines that had overwritten it."""
        self._views: Any = WeakTensorKeyDictionary()
        self._num_bytes = 0

    def view(
        self, source: Tensor, writes: Sequence[Write], results: Any, again: Callable[[Tensor], Any]
    ) -> None:
        """Note views of a tensor; `again` makes the same of another."""
        known = self._views.get(source)
        number = len(writes) if known is None else known.num_writes
        contents: Any = [None] * len(results)
        if results and known is not None and known.content is not None:
            with _disable_current_modes(), torch.no_grad():
                contents = again(known.content)
        for one, content in zip(results, contents, strict=True):
            # Some return what they are given.
            if one is not source:
                self._views[one] = _View(source, number, content)

    def write(self, tensor: Tensor, writes: list[Write], line: str) -> None:
        """Note that a tensor is written to: it and what it is a view of have new contents."""
        writes.append((WeakIdRef(tensor), region(tensor), line))
        for one in self._sources(tensor):
            if (own := self._views.get(one)) is not None:
                own.num_writes, own.content = len(writes), None

    def read(self, tensor: Tensor, writes: Sequence[Write]) -> None:
        """Note that a tensor is read."""
        own = self._views.get(tensor)
        if own is None or not writes:
            return
        later = [one for one in writes[own.num_writes :] if overlap(region(tensor), one[1])]
        writer = later[-1][0]() if later else None
        is_own = not later or any(one is writer for one in self._sources(tensor))
        with _disable_current_modes(), torch.no_grad():
            if not is_own and own.content is not None:
                # What was never written may be NaN.
                is_other = (tensor != own.content) & (own.content == own.content)
                if is_other.any() and (reader := line_of_caller(FOREIGN)):
                    self.changed[reader, later[-1][2]] = None
                return
            for one in self._sources(tensor):
                known = self._views.get(one)
                if known is None or one.numel() > MOST_ELEMENTS or self._num_bytes > MOST_BYTES:
                    return
                if later or known.content is None:
                    known.content, known.num_writes = one.detach().clone(), len(writes)
                    self._num_bytes += one.numel() * one.element_size()

    def _sources(self, tensor: Tensor) -> Iterator[Tensor]:
        """A tensor, and those that it is a view of."""
        yield tensor
        while (own := self._views.get(tensor)) is not None:
            tensor = own.source
            yield tensor


def region(tensor: Tensor) -> Region:
    """The place of a contiguous tensor in its storage."""
    return int(tensor.storage_offset()), tensor.numel()


def overlap(one: Region, other: Region) -> bool:
    """Whether two places have a common element."""
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
