"""Sequence layouts: which tokens of the sequence each context-parallel rank holds.

A layout shards tokens, targets and positions once, when the batch is read; `unshard` restores
their order. A layout also knows which part of the score matrix the causal mask leaves for the
queries of one rank and the keys of another: a few rectangles and triangles (`tiles`). No kernel
therefore needs a mask tensor.

Shapes: c ranks, T tokens in the whole sequence, n = T / c tokens per rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from titanlite.errors import ConfigError


@dataclass(frozen=True)
class Tile:
    """A rectangle of a block's score matrix, in local indices; if causal, its lower triangle.

    `queries` and `keys` are half-open ranges of rows and columns. A causal tile is square and
    includes the diagonal, so it does not matter at which corner a kernel aligns causal masks. With
    a `reach`, row i has only the columns from i - reach on; then a tile has at least as many
    columns as rows. It is of these `sequences` of the batch.
    """

    queries: slice
    keys: slice
    causal: bool
    reach: int | None = None
    sequences: slice = field(default_factory=lambda: slice(None))

    @property
    def num_pairs(self) -> int:
        """The number of unmasked query-key pairs."""
        rows = self.queries.stop - self.queries.start
        columns = self.keys.stop - self.keys.start
        return rows * (rows + 1) // 2 if self.causal else rows * columns

    def split(self, smallest: int) -> "list[Tile]":
        """Split each triangle with more than `smallest` rows into two triangles and a square."""
        start, stop = self.queries.start, self.queries.stop
        if not self.causal or stop - start <= smallest:
            return [self]
        offset = self.keys.start - start
        middle = (start + stop) // 2
        head, tail = slice(start, middle), slice(middle, stop)
        head_keys, tail_keys = (
            slice(part.start + offset, part.stop + offset) for part in (head, tail)
        )
        return [
            *Tile(head, head_keys, True).split(smallest),
            *Tile(tail, tail_keys, True).split(smallest),
            Tile(tail, head_keys, False),
        ]

    def cut(self, at: int) -> "list[Tile]":
        """The parts before and after a local index, where the positions jump."""
        rows, columns = (
            (slice(s.start, min(s.stop, at)), slice(max(s.start, at), s.stop))
            for s in (self.queries, self.keys)
        )
        pairs = ((q, k) for q, k in product(rows, columns) if not self.causal or q.start >= k.start)
        parts = [Tile(queries, keys, self.causal and queries == keys) for queries, keys in pairs]
        return [part for part in parts if part.num_pairs > 0]

    def within(self, reach: int) -> "list[Tile]":
        """The parts without the keys that are more than `reach` rows before their query."""
        rows, columns = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        if self.causal or reach >= rows - 1:
            near = replace(self, reach=reach) if reach < rows - 1 else self
            return [near] * (reach >= 0)
        # The first queries see all keys, the others one key less than the query before.
        first, start = max(0, reach + 1), self.queries.start
        all_keys = replace(self, queries=slice(start, start + first))
        rest = slice(start + first, start + min(rows, columns + reach))
        keys = slice(self.keys.start + first - reach, self.keys.stop)
        fewer = replace(self, queries=rest, keys=keys, reach=0)
        return [part for part in (all_keys, fewer) if part.queries.start < part.queries.stop]


@dataclass(frozen=True)
class Layout(ABC):
    """How a sequence is sharded over `num_ranks` ranks; all ranks hold equally many tokens."""

    # Subclasses define the tokens of each rank (`positions`), which pairs of one rank's queries and
    # another's keys the causal mask leaves (`_causal_tiles`), and the direction in which keys
    # travel around the ring (`direction`), so that they first reach the ranks that need most of
    # them. Keys that no further rank needs are dropped on the way.
    #
    # Below, c is `num_ranks` and n the number of tokens per rank. A tile is a rectangle, or a
    # triangle, of the matrix of one rank's queries and one rank's keys.

    num_ranks: int

    name: ClassVar[str]
    direction: ClassVar[int]
    chunks_per_rank: ClassVar[int] = 1

    def num_local(self, num_tokens: int) -> int:
        """The number of tokens per rank. Raises ConfigError if ranks get unequal numbers."""
        num_chunks = self.chunks_per_rank * self.num_ranks
        if num_tokens <= 0 or num_tokens % num_chunks:
            lower = num_tokens // num_chunks * num_chunks
            nearest = f"{lower} or {lower + num_chunks}" if lower else f"{num_chunks}"
            raise ConfigError(
                f"sequence length: {num_tokens} tokens cannot be split into the {num_chunks} equal "
                f"chunks that the {self.name} layout needs on {self.num_ranks} ranks; "
                f"use {nearest} tokens, or fewer ranks"
            )
        return num_tokens // self.num_ranks

    @abstractmethod
    def positions(self, rank: int, num_tokens: int) -> Tensor:
        """The positions of a rank's tokens in the whole sequence, ascending: int64 [n]."""

    @abstractmethod
    def _causal_tiles(self, query_rank: int, key_rank: int, n: int) -> list[Tile]:
        """`tiles` for two different ranks under the causal mask."""

    def tiles(self, query_rank: int, key_rank: int, n: int, causal: bool) -> list[Tile]:
        """The unmasked tiles of one rank's `n` queries and another's `n` keys; [] if all is masked.

        The tiles do not overlap. A rank's queries and its own keys are a single tile.
        """
        everything = slice(0, n)
        if not causal or query_rank == key_rank:
            return [Tile(everything, everything, causal)]
        tiles = self._causal_tiles(query_rank, key_rank, n)
        return [tile for tile in tiles if tile.num_pairs > 0]

    def shard(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """The shard of `rank`, along `dim`, of a tensor whose `dim` is the whole sequence."""
        index = self.positions(rank, tensor.size(dim)).to(tensor.device)
        return tensor.index_select(dim, index)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The tensor over the whole sequence from all shards, in rank order: undoes `shard`."""
        shuffled = torch.cat(tuple(shards), dim)
        held = [self.positions(rank, shuffled.size(dim)) for rank in range(self.num_ranks)]
        return shuffled.index_select(dim, torch.cat(held).argsort().to(shuffled.device))

    def holder(self, key_rank: int, hop: int) -> int:
        """The rank that holds `key_rank`'s keys after `hop` hops around the ring."""
        return (key_rank + self.direction * hop) % self.num_ranks

    def num_keys_carried(self, key_rank: int, hop: int, n: int, causal: bool) -> int:
        """How many of `key_rank`'s keys, always the first ones, are sent in hop `hop` (1 to c - 1).

        Each rank that the keys reach in this hop or in a later hop needs some number of them. This
        is the largest of these numbers; 0 if no rank needs any.
        """
        holders = [self.holder(key_rank, later) for later in range(hop, self.num_ranks)]
        tiles = (tile for rank in holders for tile in self.tiles(rank, key_rank, n, causal))
        return max((tile.keys.stop for tile in tiles), default=0)


class HeadTail(Layout):
    """2c chunks; rank i holds chunk i counted from the head and chunk i counted from the tail.

    All queries of a rank attend to the first half of a lower rank's keys; its second half of
    queries attends to all keys of a higher rank. Both are half a block, so the work is balanced.
    Keys travel to lower ranks first, which need all of them; the ranks above the owner need only
    the first half.
    Source: the zigzag layout of ring-flash-attention, and Llama 3 (arXiv 2407.21783, 3.3.2).
    """

    name = "headtail"
    direction = -1
    chunks_per_rank = 2

    def positions(self, rank: int, num_tokens: int) -> Tensor:
        half = self.num_local(num_tokens) // 2
        tail = 2 * self.num_ranks - 1 - rank
        return torch.cat([torch.arange(half) + chunk * half for chunk in (rank, tail)])

    def _causal_tiles(self, query_rank: int, key_rank: int, n: int) -> list[Tile]:
        if key_rank < query_rank:
            return [Tile(slice(0, n), slice(0, n // 2), False)]
        return [Tile(slice(n // 2, n), slice(0, n), False)]


class Striped(Layout):
    """Rank i holds every c-th token from token i on, so each block is nearly a triangle.

    The work is balanced except for the diagonal, which is masked in the blocks of higher ranks.
    Source: Striped Attention, arXiv 2311.09431.
    """

    name = "striped"
    direction = 1

    def positions(self, rank: int, num_tokens: int) -> Tensor:
        self.num_local(num_tokens)
        return torch.arange(rank, num_tokens, self.num_ranks)

    def _causal_tiles(self, query_rank: int, key_rank: int, n: int) -> list[Tile]:
        if key_rank < query_rank:
            return [Tile(slice(0, n), slice(0, n), True)]
        # Strictly below the diagonal: the first query and the last key are fully masked.
        return [Tile(slice(1, n), slice(0, n - 1), True)]


class Contiguous(Layout):
    """Rank i holds the i-th of c contiguous parts. With a causal mask the work is unbalanced.

    Tokens keep their order, and rank i computes i + 1 blocks. Keys travel up to the last rank,
    since no rank needs the keys of a higher one.
    """

    name = "none"
    direction = 1

    def positions(self, rank: int, num_tokens: int) -> Tensor:
        n = self.num_local(num_tokens)
        return torch.arange(rank * n, (rank + 1) * n)

    def _causal_tiles(self, query_rank: int, key_rank: int, n: int) -> list[Tile]:
        return [Tile(slice(0, n), slice(0, n), False)] if key_rank < query_rank else []


LAYOUTS: dict[str, type[Layout]] = {kind.name: kind for kind in (HeadTail, Striped, Contiguous)}


def make_layout(name: str, num_ranks: int) -> Layout:
    """The layout `name`: "headtail", "striped" or "none". Raises ConfigError for other names."""
    if name not in LAYOUTS:
        known = ", ".join(f'"{known}"' for known in LAYOUTS)
        raise ConfigError(f'layout: "{name}" is not a sequence layout; use one of {known}')
    return LAYOUTS[name](num_ranks)
