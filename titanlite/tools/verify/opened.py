"""On a rank: a job that is built in a world which serves one job after another."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Iterator

import numpy as np
import torch

from titanlite.config import ResolvedJob
from titanlite.job import Job, build_job
from titanlite.ranks.settings import own_settings
from titanlite.ranks.world import World


@contextlib.contextmanager
def open_job(world: World, resolved: ResolvedJob) -> Iterator[Job]:
    """Build the job in a world that is reused from job to job."""
    with own_settings():
        # Ranks forked from one process share its random state; ranks on different machines do not.
        # A different seed on each rank makes missing seeds show up here too.
        seed = hash((world.rank, time.monotonic_ns())) % 2**32
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            job = build_job(resolved, world)
            # Nor does the job seed its steps: what it draws differs from run to run, and shows up.
            job.trainer.generators = None
            yield job
        finally:
            gc.collect()
