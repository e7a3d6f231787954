"""What the host knows of the documents of a batch, so that attention does not ask the device.

A batch is made on the CPU. Where its field `documents` [B, T] is cut or moved, what the host knows
is noted on the new tensor; all layers and passes of a microbatch share what is made of it. A tensor
without a note is read once. Shapes: c ranks that share B sequences, T tokens of a rank.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.modules.attention.layout import Tile
from titanlite.modules.device_support import support

KNOWN = "titanlite_documents"


class Rows(NamedTuple):
    """Sequences one after another in B x T tokens, for kernels that take them so.

    `bounds` are the places int32 [N + 1] where a sequence's queries and its keys begin, and the
    most of each. Where `is_out` [B, T], the query has no key and the key no query.
    """

    bounds: tuple[Tensor, Tensor, int, int]
    is_out: Tensor


class Documents:
    """The documents of a microbatch; `numbers` [c, B, T] are those of the shards of all ranks.

    `rows` are those of a single rank, if its device has a kernel for them.
    """

    rows: Rows | None = None

    def __init__(self, documents: Tensor, numbers: np.ndarray) -> None:
        self.numbers, self._device = numbers, documents.device
        self._biases: dict[Any, Tensor] = {}
        self._tiles: dict[tuple[int, ...], Rows | None] = {}
        # If a number comes again, all its tokens are one document.
        self.is_in_order = bool((np.diff(numbers) >= 0).all())
        # A DTensor has no own ones.
        is_plain = not is_traceable_wrapper_subclass(documents)
        if is_plain and len(numbers) == 1 and self.is_in_order and takes_rows(self._device):
            self.rows = rows_of(numbers[0], numbers[0], self._device)

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # copies and files of the tensor have no note

    @cached_property
    def whole(self) -> Tensor:
        """The numbers on the device."""
        return moved(torch.from_numpy(self.numbers), self._device)

    def bias(self, kind: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """What all layers of one kind add to their scores: 0 where the mask of `make` is true.

        The last of `kind` is the dtype.
        """
        if kind not in self._biases:
            is_out = make().logical_not()
            zeros = torch.zeros_like(is_out, dtype=kind[-1])
            self._biases[kind] = zeros.masked_fill_(is_out, -torch.inf)
        return self._biases[kind]

    def parts(self, rank: int, other: int, tile: Tile) -> "tuple[list[Tile], Documents | None]":
        """The parts of a tile of two ranks with pairs of one document; self if with others too."""
        own, theirs = self.numbers[rank, :, tile.queries], self.numbers[other, :, tile.keys]
        first, last = np.maximum(own.min(1), theirs.min(1)), np.minimum(own.max(1), theirs.max(1))
        low, high = np.minimum(own.min(1), theirs.min(1)), np.maximum(own.max(1), theirs.max(1))
        if (low == high).all():
            return [tile], None
        if tile.causal or not self.is_in_order or (first < last).any():
            return [tile] * bool((first <= last).any()), self
        # A sequence has at most one document in both parts, which is a rectangle.
        found = []
        for row in np.flatnonzero(first == last).tolist():
            bounds = [first[row], first[row] + 1]
            queries, keys = (
                slice(*(side.start + numbers[row].searchsorted(bounds)).tolist())
                for side, numbers in ((tile.queries, own), (tile.keys, theirs))
            )
            found.append(Tile(queries, keys, False, sequences=slice(row, row + 1)))
        return found, None

    def in_a_row(self, rank: int, other: int, tile: Tile) -> Rows | None:
        """The documents of a tile in a row, for all layers; None if not causal, or not in order.

        An index whose query is of a later document than its key has no pairs: later queries are of
        no earlier document, and earlier keys of no later one.
        """
        kind = (rank, other, tile.causal, tile.queries.start, tile.queries.stop, tile.keys.start)
        if kind not in self._tiles:
            own, theirs = self.numbers[rank, :, tile.queries], self.numbers[other, :, tile.keys]
            is_in_order = tile.causal and self.is_in_order and (theirs <= own).all()
            self._tiles[kind] = rows_of(own, theirs, self._device) if is_in_order else None
        return self._tiles[kind]


@torch.compiler.assume_constant_result
def takes_rows(device: torch.device) -> bool:
    """Whether the device has a kernel for sequences one after another, and for windows."""
    return support().capability(device) >= (8, 0)


def rows_of(own: np.ndarray, theirs: np.ndarray, device: torch.device) -> Rows:
    """The runs of one pair of numbers in the tokens of `own` and `theirs` [B, T]."""
    is_first = np.ones(own.shape, bool)
    is_first[:, 1:] = (np.diff(own) != 0) | (np.diff(theirs) != 0)
    starts = np.append(np.flatnonzero(is_first), own.size).astype(np.int32)
    longest = int(np.diff(starts).max())
    places, is_out = (moved(torch.from_numpy(x), device) for x in (starts, own != theirs))
    return Rows((places, places, longest, longest), is_out)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device; to a GPU from pinned memory, so that the host does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu" and type(tensor) is Tensor:
        tensor = tensor.pin_memory()
    # The CPU would read a copy that has only begun.
    return tensor.to(device, dtype, device.type != "cpu")


def note(documents: Tensor, numbers: np.ndarray) -> Documents:
    """Note on `documents` [B, T] the `numbers` [c, B, T] of all ranks."""
    setattr(documents, KNOWN, found := Documents(documents, numbers))
    return found


def noted(documents: Tensor) -> Documents | None:
    """What is noted on a tensor, or on the batch of which it is a microbatch."""
    found: Documents | None = getattr(documents, KNOWN, None) or None
    whole = None if found else getattr(documents._base, KNOWN, None)
    if whole is not None and documents.size(1) == whole.numbers.shape[2]:
        # A part of a batch says by its offset which rows it has.
        first = int(documents.storage_offset()) // documents.size(1)
        found = note(documents, whole.numbers[:, first : first + documents.size(0)])
    return found


def known_of(documents: Tensor) -> Documents | None:
    """What is noted; a tensor of a single rank without a note is read, but not by a compiler."""
    if torch.compiler.is_compiling() or documents.is_meta:
        return getattr(documents, KNOWN, None) or None
    return noted(documents) or note(documents, on_host(documents[None]))


def on_host(numbers: Tensor) -> np.ndarray:
    """A copy on the host; what has no values, as in a plan, is one document."""
    return numbers.cpu().numpy().copy() if type(numbers) is Tensor else np.zeros(numbers.shape)


def same_document(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """A mask [B, 1, T, S], true where query [B, T] and key [B, S] have the same document."""
    return of_queries[:, None, :, None] == of_keys[:, None, None, :]
