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
from titanlite.mesh.parallel_dims import axes_where
from titanlite.ranks.settings import own_settings
from titanlite.ranks.turns import is_rank
from titanlite.ranks.world import World
from titanlite.tools.verify.subject import LocalPart, Subject


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
            if not is_rank():  # threads are cleaned up after
                gc.collect()


def subject_of(job: Job) -> Subject:
    """A job as what is compared. Its parameters are those of now: FSDP2 registers others in a step.

    A module's output is the logits if it is the whole model, or the last stage.
    """
    pipeline, stages = job.pipeline, axes_where(weights="stages")
    return Subject(
        local={name: LocalPart(own.shape, own) for name, own in job.parameters.items()},
        optimizer=job.trainer.optimizer,
        modules=job.parts,
        is_whole=[
            pipeline is None or (pipeline.has_last and part is job.parts[-1]) for part in job.parts
        ],
        groups={
            axis: job.meshes.world[axis].get_group()
            for axis in job.dims.axes_in_use
            if axis not in stages
        },
        device=job.world.device,
    )
