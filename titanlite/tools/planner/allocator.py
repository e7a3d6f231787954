"""torch's allocator of a GPU, replayed: what it takes of the device for blocks of memory. No torch.

With segments that expand, each stream has one for blocks of more than 1 MiB, and one for smaller
ones. What a stream frees is not given to another stream, and a segment never shrinks: it takes the
device's memory up to its highest block, with all gaps below that fit none. Source:
https://github.com/pytorch/pytorch/blob/v2.11.0/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

from bisect import bisect_left, insort

ROUNDED_TO = 512
SMALL = 1 << 20
# What a segment takes of the device at a time; one of small blocks takes less.
PAGE, SMALL_PAGE = 20 << 20, 2 << 20


class _Segment:
    """The addresses of one segment, from 0 to `end`."""

    def __init__(self, page: int) -> None:
        self.end, self._page = 0, page
        # The free parts: (size, address), and the same by first and by last address.
        self._by_size: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}

    def take(self, size: int) -> int:
        """The address of a new block: in the smallest part that fits, or at the end."""
        for found, address in self._by_size[bisect_left(self._by_size, (size, 0)) :]:
            # The last part can grow, so it counts as the largest.
            if address + found < self.end:
                break
        else:
            address = self._starts.get(self.end, self.end)
            found = self.end - address
        if found:
            self._forget(address)
        if (missing := size - found) > 0:
            grown = _rounded(missing, self._page)
            self.end, found = self.end + grown, found + grown
        if found > size:
            self._note(address + size, found - size)
        return address

    def give_back(self, address: int, size: int) -> None:
        """Free a block; free parts beside it become one with it."""
        if address + size in self._sizes:
            size += self._forget(address + size)
        if (before := self._starts.get(address)) is not None:
            size, address = size + self._forget(before), before
        self._note(address, size)

    def _note(self, address: int, size: int) -> None:
        insort(self._by_size, (size, address))
        self._sizes[address], self._starts[address + size] = size, address

    def _forget(self, address: int) -> int:
        size = self._sizes.pop(address)
        del self._starts[address + size]
        self._by_size.pop(bisect_left(self._by_size, (size, address)))
        return size


class Allocator:
    """The allocator of one device, which it takes in pages unless it `is_exact`."""

    def __init__(self, *, is_exact: bool = False) -> None:
        self._pages = (ROUNDED_TO, ROUNDED_TO) if is_exact else (PAGE, SMALL_PAGE)
        self._segments: dict[tuple[int, bool], _Segment] = {}
        self._blocks: dict[int, tuple[_Segment, int, int]] = {}

    def resize(self, block: int, num_bytes: int, stream: int) -> None:
        """Give a block other memory, on a stream; 0 bytes free it."""
        if block in self._blocks:
            segment, address, size = self._blocks.pop(block)
            segment.give_back(address, size)
        if num_bytes:
            size = _rounded(num_bytes, ROUNDED_TO)
            is_small = size <= SMALL
            key = stream, is_small
            segment = self._segments.setdefault(key, _Segment(self._pages[is_small]))
            self._blocks[block] = segment, segment.take(size), size

    @property
    def reserved(self) -> int:
        """The bytes that it has taken of the device."""
        return sum(segment.end for segment in self._segments.values())


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
