"""On a rank: its part of each batch, and which rows and columns of the batch these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import Grid
from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import digest_of
from titanlite.tools.verify.program.request import Split


def check_batches(batches: Sequence[Any], split: Split | None) -> None:
    """Raises ConfigError for a batch with tensors that are not seen, and so would not be split."""
    for batch in () if callable(split) else batches:
        leaves = tree_leaves(batch)
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        unseen = [leaf for leaf in others if _has_values(leaf)]
        if split is not None and len(others) == len(leaves):
            unseen = unseen or others or [batch]
        if unseen:
            raise ConfigError(
                f"batches: no tensors are seen in a {type(unseen[0]).__name__}; give tensors, in "
                "dicts, tuples or lists (torch.from_numpy, dict or vars may make them), or a "
                "function split(batch, mesh)"
            )


def _has_values(leaf: Any) -> bool:
    """Whether there are numbers in what is no tensor, and no dict, tuple or list."""
    own = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
    is_array = hasattr(leaf, "__array__") and np.ndim(leaf) > 0
    return is_array or any(isinstance(value, Tensor) for value in own.values())


def part_of_batch(batch: Any, split: Split | None, mesh: Any, grid: Grid, rank: int) -> Any:
    """This rank's part of a batch; raises ConfigError if it cannot be split evenly."""
    if split is None:
        return batch
    if isinstance(split, str):
        split = {split: 0}
    if isinstance(split, Mapping):
        leaves, spec = tree_flatten(batch)
        return tree_unflatten([_part(leaf, split, grid, rank) for leaf in leaves], spec)
    return split(batch, mesh)


def _part(leaf: Any, split: Mapping[str, int], grid: Grid, rank: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    for dim in sorted(set(split.values())):
        axes = tuple(axis for axis, own in split.items() if own == dim)
        count = grid.degree_of(axes)
        if leaf.ndim <= dim:
            continue
        if leaf.size(dim) % count:
            raise ConfigError(
                f"split: a tensor of shape {list(leaf.shape)} has no {count} equal parts along "
                f"dimension {dim}, one for each rank of {' x '.join(axes)}; give other batches, "
                "or a function split(batch, mesh)"
            )
        leaf = leaf.chunk(count, dim)[grid.place_on(axes, rank)]
    return leaf


@dataclass
class Where:
    """The rows and columns of the whole batch's [B, T] that this rank has."""

    num_rows: int
    num_columns: int
    rows: Tensor
    columns: Tensor

    @property
    def cells(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        rows, columns = self.rows.tolist(), self.columns.tolist()
        return self.num_rows, self.num_columns, tuple(rows), tuple(columns)


def find_part(batch: Any, split: Split | None, mesh: Any, grid: Grid, rank: int) -> Where | None:
    """Which rows and columns this rank has; None if that cannot be found.

    Each tensor of the batch is replaced by the numbers of its elements and split: the numbers that
    come out say which elements the rank has. A function that does more than select finds None.
    """
    leaves, spec = tree_flatten(batch)
    numbers = [
        torch.arange(leaf.numel()).view(leaf.shape) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    whole = next((n for n in numbers if isinstance(n, Tensor) and n.ndim >= 1), None)
    whole = next((n for n in numbers if isinstance(n, Tensor) and n.ndim >= 2), whole)
    if whole is None or not whole.numel():
        return None
    place = next(index for index, number in enumerate(numbers) if number is whole)
    try:
        probe = tree_unflatten(numbers, spec)
        own = tree_leaves(part_of_batch(probe, split, mesh, grid, rank))[place]
        return _where(local_part(own) if isinstance(own, Tensor) else own, whole)
    except Exception:
        return None


def _where(own: Any, whole: Tensor) -> Where | None:
    if not isinstance(own, Tensor) or own.ndim != whole.ndim or not own.numel():
        return None
    num_columns = whole.size(1) if whole.ndim > 1 else 1
    rest = whole[0, 0].numel() if whole.ndim > 1 else 1
    flat = own.reshape(own.size(0), own.size(1) if own.ndim > 1 else 1, -1)[:, :, 0] // rest
    rows, columns = flat[:, 0] // num_columns, flat[0] % num_columns
    if not torch.equal(flat, rows[:, None] * num_columns + columns[None]):
        return None
    return Where(whole.size(0), num_columns, rows, columns)


def digest_of_batch(batch: Any) -> str:
    """Equal for equal parts of a batch."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return " ".join(digest_of(local_part(leaf)) for leaf in leaves)
