"""Ways to end a rank at a chosen moment, for the tests."""

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config import JobConfig, resolve_job
from titanlite.ranks.launch import Place

# What a run goes through, and about how often in one of some steps with a few saves.
MOMENTS = {
    "step": 12,
    "gradients": 6,
    "write": 60,
    "flush": 20,
    "seal": 3,
    "rename": 4,
    "remove": 3,
    "copy": 60,
}


@dataclass(frozen=True)
class Fault:
    """SIGKILL, at the `count`-th time that a rank of `ranks` comes to `moment`; None: all ranks."""

    moment: str
    count: int
    ranks: tuple[int, ...] | None

    def install(self, place: Place) -> None:
        """Arm it in this rank."""
        if self.ranks is not None and place.rank not in self.ranks:
            return
        left = [self.count]
        lock = threading.Lock()

        def reached() -> None:
            with lock:
                left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        for owner, name in _functions(self.moment):
            setattr(owner, name, _before_and_after(getattr(owner, name), reached))


def draw_fault(
    random_: random.Random, num_ranks: int, *, asynchronous: bool, kills: str = "one or all"
) -> Fault:
    """Any moment, at any time, of one rank or of all; `kills` "one" or "all" says of which."""
    moments = [moment for moment in MOMENTS if asynchronous or moment != "copy"]
    moment = random_.choice(moments)
    # Names, renames and removals are the first rank's.
    first_only = moment in ("seal", "rename", "remove")
    one = (0,) if first_only else (random_.randrange(num_ranks),)
    ranks = {"one": one, "all": None}[random_.choice(kills.split(" or "))]
    return Fault(moment, random_.randint(1, MOMENTS[moment]), ranks)


def train_with(place: Place, config: JobConfig, fault: Fault | None) -> None:
    """The run of train.py, with a fault in it."""
    from titanlite.run import train_on_rank as train

    if fault is not None:
        fault.install(place)
    train(place, resolve_job(config, place.world_size), "cpu")


def _functions(moment: str) -> list[tuple[Any, str]]:
    import shutil

    from titanlite.checkpoint import folder, staging, storage
    from titanlite.training.step import Trainer

    return {
        "step": [(Trainer, "step")],
        "gradients": [(Trainer, "_update")],
        "write": [(storage._HashingFile, "write")],
        "flush": [(os, "fsync")],
        "seal": [(folder.CheckpointFolder, "commit")],
        "rename": [(Path, "rename")],
        "remove": [(shutil, "rmtree")],
        "copy": [(staging.CpuStager, "_copy")],
    }[moment]


def _before_and_after(function: Callable[..., Any], reached: Callable[[], None]) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        reached()
        result = function(*args, **kwargs)
        reached()
        return result

    return wrapped
