"""Peers: the ranks of a process group, which agree on values, results and errors."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from titanlite.errors import TitanliteError

T = TypeVar("T")


class Peers:
    """The ranks of a process group; without torch.distributed, this process alone.

    Every rank must make the same calls, one thread at a time. An error of one rank is raised on
    all, so that none waits for another. The default group is that of the world.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        is_alone = not dist.is_initialized()
        self.group = None if is_alone else group or dist.group.WORLD
        self.rank = 0 if is_alone else dist.get_rank(self.group)
        self.size = 1 if is_alone else dist.get_world_size(self.group)

    def gathered(self, value: T) -> list[T]:
        """All-gather a value: the values of all ranks, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank; all return its result, or raise its error."""
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = function()
            except (TitanliteError, OSError) as error:
                box[1] = error
        if self.group is not None:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def all_do(self, function: Callable[[], T]) -> T:
        """What `function` returns here; if it fails on any, all raise the lowest rank's error."""
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(function())
        except (TitanliteError, OSError) as error:
            failure = error
        first = next(filter(None, self.gathered(failure)), None)
        if first is not None:
            raise first
        return results[0]
