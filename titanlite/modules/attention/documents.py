"""What the host knows of the documents of a batch, so that attention does not ask the device.

A batch is made on the CPU. Where its field `documents` [B, T] is cut or moved, what the host knows
is noted on the new tensor; all layers and passes of a microbatch share what is made of it. A tensor
without a note is read once. Shapes: c ranks that share B sequences, T tokens of a rank.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

KNOWN = "titanlite_documents"


class Documents:
    """The documents of a microbatch; `numbers` [c, B, T] are those of the shards of all ranks.

    For kernels that take sequences one after another, `starts` int32 [N + 1] are the places in the
    B x T tokens where a document begins, and B x T; `longest` is the length of the longest.
    """

    starts: Tensor | None = None
    longest = 0

    def __init__(self, documents: Tensor, numbers: np.ndarray) -> None:
        self.numbers, self._device = numbers, documents.device
        self._biases: dict[Any, Tensor] = {}
        steps = np.diff(numbers)
        # A DTensor has no own ones. If a number comes again, all its tokens are one document.
        is_plain = not is_traceable_wrapper_subclass(documents)
        is_in_order = is_plain and len(numbers) == 1 and (steps >= 0).all()
        if is_in_order and takes_rows(self._device):
            is_first = np.pad(steps, ((0, 0), (0, 0), (1, 0)), constant_values=1)
            starts = np.append(np.flatnonzero(is_first), numbers.size)
            self.longest = int(np.diff(starts).max())
            self.starts = moved(torch.from_numpy(starts.astype(np.int32)), self._device)

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

    def compare(self, rank: int, part: slice, other: int, keys: slice) -> tuple[bool, bool]:
        """Whether tokens of two ranks may have a document in common, and whether all have one."""
        own, theirs = self.numbers[rank, :, part], self.numbers[other, :, keys]
        first, last = np.maximum(own.min(1), theirs.min(1)), np.minimum(own.max(1), theirs.max(1))
        low, high = np.minimum(own.min(1), theirs.min(1)), np.maximum(own.max(1), theirs.max(1))
        return bool((first <= last).any()), bool((low == high).all())


def takes_rows(device: torch.device) -> bool:
    """Whether the device has a kernel for sequences one after another."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


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
