"""The process group of saves and loads, and collective helpers that agree on files and errors.

The group is separate from training's, so a background save never interleaves with training's
collectives. An error on one rank is raised on all ranks, so that none waits for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from titanlite.errors import TitanliteError
from titanlite.ranks.hang_state import CHECKPOINTS
from titanlite.ranks.world import World, set_group_timeout

T = TypeVar("T")


class CheckpointGroup:
    """Collectives of saves and loads; every rank must make the same calls, one thread at a time.

    Here ranks wait for the disks of others, so the timeout is longer than that of a step:
    `timeout_seconds`, which is comm.checkpoint_timeout_seconds.
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
    def with_long_timeout(self) -> Iterator[None]:
        """Inside, this rank uses the long timeout, and so does a save that starts inside."""
        # The world may have set the timeout of this group, too.
        set_group_timeout(timedelta(seconds=self._timeout_seconds), self.group)
        with self.world.allowing(self._timeout_seconds, "comm.checkpoint_timeout_seconds"):
            yield

    def from_first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0; all ranks return its result, or raise its error."""
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
        """All-gather a value: the values of all ranks, in rank order."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_do(self, function: Callable[[], None]) -> None:
        """Call `function` on every rank; if any fails, all raise the error of the lowest rank."""
        failure: Exception | None = None
        try:
            function()
        except (TitanliteError, OSError) as error:
            failure = error
        first = next(filter(None, self.gathered(failure)), None)
        if first is not None:
            raise first
