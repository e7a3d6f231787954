"""The process group of saves and loads.

It is separate from training's, so a background save never interleaves with training's collectives.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from titanlite.ranks.hang_state import CHECKPOINTS
from titanlite.ranks.peers import Peers
from titanlite.ranks.world import World, set_group_timeout


class CheckpointGroup(Peers):
    """The collectives of saves and loads.

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
        super().__init__(group)

    @contextlib.contextmanager
    def with_long_timeout(self) -> Iterator[None]:
        """Inside, this rank uses the long timeout, and so does a save that starts inside."""
        # The world may have set the timeout of this group, too.
        set_group_timeout(timedelta(seconds=self._timeout_seconds), self.group)
        with self.world.watch.allowing(self._timeout_seconds, "comm.checkpoint_timeout_seconds"):
            yield
