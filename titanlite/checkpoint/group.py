"""What the ranks of a run decide together about files, over a process group of its own.

Training's groups are left alone, so that a save in the background never comes between training's
own collectives; and what fails on one rank is raised on all, so that none waits for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from titanlite.errors import TitanliteError
from titanlite.ranks.account import CHECKPOINTS
from titanlite.ranks.world import World, set_group_timeout

T = TypeVar("T")


class CheckpointGroup:
    """Every rank of the world must make the same calls, from one thread at a time.

    Ranks wait here for each other's disks, not for a step: for `timeout_seconds`, which is
    comm.checkpoint_timeout_seconds.
    """

    def __init__(self, world: World, timeout_seconds: float) -> None:
        self.world = world
        self._timeout_seconds = timeout_seconds
        group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds), group_desc=CHECKPOINTS
        )
        assert isinstance(group, dist.ProcessGroup)
        self.group = group

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Inside, this rank waits so long, and a save that is begun inside does."""
        # The timeouts of all groups are set alike.
        set_group_timeout(timedelta(seconds=self._timeout_seconds), self.group)
        with self.world.allowing(self._timeout_seconds, "comm.checkpoint_timeout_seconds"):
            yield

    def from_first(self, function: Callable[[], T]) -> T:
        """What `function` gives on the first rank, on all; so with what it raises there."""
        box: list[Any] = [None, None]
        if self.world.is_first:
            try:
                box[0] = function()
            except (TitanliteError, OSError) as error:
                box[1] = error
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, on all."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_do(self, function: Callable[[], None]) -> None:
        """Call it on every rank; where one fails, all raise what the first of them raised."""
        failure: Exception | None = None
        try:
            function()
        except (TitanliteError, OSError) as error:
            failure = error
        first = next(filter(None, self.gathered(failure)), None)
        if first is not None:
            raise first
