"""On a rank: whether anything is computed with what a backward pass receives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

# Operators that read no element, or whose results only have what they are given.
OF_SHAPE = ("empty", "zeros", "ones", "full", "new_", "rand")
PASSING = ("stack", "cat", "clone", "copy", "contiguous", "_to_copy", "lift_fresh")

Part = tuple[str, int]
"""A line that receives a tensor, and which of the parts into which that is unbound; -1 for all."""


class Received:
    """Follows tensors that a rank receives."""

    def __init__(self) -> None:
        self._parts: Any = WeakTensorKeyDictionary()
        self._is_used: dict[Part, bool] = {}

    def arrive(self, tensors: Iterable[Tensor], line: str) -> None:
        """Note what a line receives."""
        for tensor in tensors:
            self._parts[tensor] = {(line, -1)}

    def follow(self, operator: Any, given: Any, result: Any) -> None:
        """Note what an operator, which is no collective, does with it."""
        own = {
            part
            for leaf in tree_leaves(given)
            if isinstance(leaf, Tensor)
            for part in self._parts.get(leaf, ())
        }
        name = operator._schema.name.partition("::")[2].rstrip("_")
        if not own or name.startswith(OF_SHAPE):
            return
        if not operator.is_view and name not in PASSING:
            self._is_used |= dict.fromkeys(own, True)
            return
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for index, one in enumerate(found):
            parts = {(line, index if n < 0 < len(found) - 1 else n) for line, n in own}
            self._parts[one] = parts
            for part in parts:
                self._is_used.setdefault(part, False)

    @property
    def unused(self) -> dict[str, tuple[int, ...]]:
        """A line -> parts that it receives and with which nothing is computed, unlike others."""
        found: dict[str, tuple[int, ...]] = {}
        for (line, number), is_used in sorted(self._is_used.items()):
            others = [n for (other, n), used in self._is_used.items() if other == line and used]
            if number >= 0 and not is_used and any(n >= 0 for n in others):
                found[line] = (*found.get(line, ()), number)
        return found
