"""On a rank: keeps what each line of the caller's code computes in the forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import is_pending
from titanlite.tools.verify.watching import group_of

# Larger values are not kept.
MOST_ELEMENTS, MOST_BYTES = 1 << 20, 1 << 28
# Their results may be written after they return.
COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor")
# Operators of which a row of the result depends on one row alone, and on the weights.
ROW_BY_ROW = ("mm", "addmm", "bmm", "linear", "matmul", "embedding", "view", "t", "transpose")
WAIT = torch.ops._c10d_functional.wait_tensor.default

Key = tuple[str, str, str]
"""The call of the innermost module, the line, and the operator."""
Place = tuple[Key, int]
"""Which of the values of a key."""


@dataclass
class Values:
    """The values of one forward pass, in order."""

    of: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    places: list[Place] = field(default_factory=list)
    tensors: list[Tensor | None] = field(default_factory=list)
    sources: list[tuple[int, ...]] = field(default_factory=list)
    mixes: list[bool] = field(default_factory=list)
    """Whether an element of the value depends on several of what it is computed from."""
    groups: dict[str, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))
    """Call of a module -> the groups of ranks that exchange something inside it."""
    num_bytes: int = 0
    _makers: Any = field(default_factory=WeakTensorKeyDictionary)

    def note(self, calls: Sequence[str], line: str, operator: Any, given: Any, result: Any) -> None:
        """Note the first tensor that an operator returns, inside calls of modules."""
        if operator.namespace in COMMUNICATION:
            groups = filter(None, map(group_of, tree_leaves(given)))
            ranks = next((tuple(dist.get_process_group_ranks(one)) for one in groups), ())
            for call in calls:
                self.groups[call].add(ranks)
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not found:
            return
        sources = dict.fromkeys(
            self._makers[leaf]
            for leaf in tree_leaves(given)
            if isinstance(leaf, Tensor) and leaf in self._makers
        )
        key = (calls[-1] if calls else "", line, str(operator))
        self.places.append((key, len(self.of[key])))
        self.of[key].append(len(self.tensors))
        for one in found:
            self._makers[one] = len(self.tensors)
        self.sources.append(tuple(sources))
        name = operator.name().partition("::")[2].partition(".")[0]
        self.mixes.append(torch.Tag.pointwise not in operator.tags and name not in ROW_BY_ROW)
        self.tensors.append(self._copy(operator, found[0]))

    def follow(self, value: Tensor, alias: Tensor) -> None:
        """An alias has the value of a tensor."""
        if value in self._makers:
            self._makers[alias] = self._makers[value]

    def save(self, folder: str) -> None:
        """Save what the ranks compare theirs with."""
        values = {key: [self.tensors[i] for i in numbers] for key, numbers in self.of.items()}
        torch.save(values, values_file(folder))

    def _copy(self, operator: Any, value: Tensor) -> Tensor | None:
        is_open = operator.namespace in COMMUNICATION and operator is not WAIT
        # Memory without values, which the next line writes.
        is_open = is_open or "empty" in operator.name()
        if is_open or is_pending(value):
            return None
        local = local_part(value.detach())
        if local.numel() > MOST_ELEMENTS or self.num_bytes > MOST_BYTES:
            return None
        self.num_bytes += local.numel() * local.element_size()
        return local.cpu().clone()


def values_file(folder: str) -> Path:
    return Path(folder) / "values.pt"
