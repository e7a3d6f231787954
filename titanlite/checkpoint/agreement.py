"""What the ranks of a run decide together about files, over a process group of its own.

Training's groups are left alone, so that a save in the background never comes between training's
own collectives; and what fails on one rank is raised on all, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from titanlite.errors import TitanliteError
from titanlite.mesh.world import World

T = TypeVar("T")

# Ranks wait here for each other's disks, not for a step.
WAIT = timedelta(hours=2)


class Agreement:
    """Every rank of the world must make the same calls, from one thread at a time."""

    def __init__(self, world: World) -> None:
        self.world = world
        group = dist.new_group(backend="gloo", timeout=WAIT, group_desc="checkpoints")
        assert group is not None
        self.group = group

    def be_patient(self) -> None:
        """Wait as long as it takes in this group; the timeouts of all groups are set alike."""
        dist.distributed_c10d._set_pg_timeout(WAIT, self.group)

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
