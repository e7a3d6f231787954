"""A debugger in one rank of a job of TorchTitan, as tools/debug has for titanlite's own."""

from __future__ import annotations

import math

from titanlite.errors import ConfigError
from titanlite.ranks.launch import Place
from titanlite.ranks.world import open_world
from titanlite.tools.debug.command import debug_ranks
from titanlite.tools.torchtitan import trainer
from titanlite.tools.torchtitan.job import TitanJob
from titanlite.tools.torchtitan.options import Options
from titanlite.tools.torchtitan.stand_ins import require_torchtitan, standing_in
from titanlite.tools.verify.program.building import in_dtype


def debug_job(options: Options) -> int:
    """Train a job for some steps, with a debugger; returns the exit status."""
    require_torchtitan()
    with standing_in():
        job = TitanJob(options.name, tuple(options.titan), options.dtype, options.full)
        plan = job.plan(options.ranks)
        size = math.prod(plan.degrees.values())
        if options.rank is not None and options.rank >= size:
            raise ConfigError(
                f"--rank: {options.rank} is no rank of this job; give 0 to {size - 1}"
            )
        return debug_ranks(size, options.rank, _train, job, options)


def _train(place: Place, job: TitanJob, options: Options) -> None:
    """Build and step a rank's part of the job, without a reference."""
    with open_world(place) as world, in_dtype(job.dtype):
        plan = job.plan(options.ranks)
        mesh = trainer.mesh_of(plan.degrees)
        built = trainer.build_plan(job, options.ranks, mesh)
        for step, batch in enumerate(job.batches(plan, options.steps), 1):
            part = trainer.split(plan.degrees, plan.balances, batch, mesh)
            loss = trainer.run_step(built, part)
            norm = trainer.clip(built)
            built[-1].advance()
            if loss is not None and world.is_first:
                print(f"step {step}: loss {loss:.6g}, gradient norm {float(norm):.6g}")
