"""Verifies a job of TorchTitan: a call of titanlite.tools.verify.program, composed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from titanlite.tools.torchtitan import trainer
from titanlite.tools.torchtitan.job import TitanJob, TitanPlan, kernels_of
from titanlite.tools.torchtitan.stand_ins import STAND_INS, require_torchtitan, standing_in
from titanlite.tools.verify.program.comparison import Comparer
from titanlite.tools.verify.program.result import Comparison

if TYPE_CHECKING:
    from titanlite.tools.torchtitan.options import Options

Lines = Sequence[tuple[str, str]]


def verify_job(options: Options, on_start: Callable[[Lines], None]) -> Comparison:
    """Compare a job under its plan with one rank; `on_start` gets the lines about both."""
    require_torchtitan()
    with standing_in():
        job = TitanJob(options.name, tuple(options.titan), options.dtype, options.full)
        plan = job.plan(options.ranks)
        on_start(list(describe(job, plan, options)))
        used = {axis: degree for axis, degree in plan.degrees.items() if degree > 1}
        with Comparer(threads=not options.processes) as comparer:
            return comparer.compare(
                partial(trainer.build_reference, job, plan.ranks),
                partial(trainer.build_plan, job, plan.ranks),
                batches=job.batches(plan, options.steps),
                loss=trainer.run_step,
                step=trainer.run_step,
                reference_step=trainer.run_step,
                clip=trainer.clip,
                split=partial(trainer.split, plan.degrees, plan.balances),
                ranks=used or {"dp_shard": 1},
                copy_weights=True,
                # Hooks would be part of the graphs, which TorchTitan wants to be whole.
                modules=not plan.config.compile.enable,
                dtype=options.dtype,
                tolerance=options.tolerance,
            )


def describe(job: TitanJob, plan: TitanPlan, options: Options) -> Iterator[tuple[str, str]]:
    """What runs, what it is compared with, and what stands in for what."""
    degrees = " x ".join(f"{axis} {n}" for axis, n in plan.degrees.items() if n > 1) or "one rank"
    parallelism = plan.config.parallelism
    ep = parallelism.expert_parallel_degree
    kind = "processes" if options.processes else "threads"
    text = (
        f"torchtitan:{job.name}: {degrees}{f', ep {ep}' if ep > 1 else ''}, "
        f"{math.prod(plan.degrees.values())} ranks as {kind}"
    )
    yield "plan", text
    text = (
        f"its model on one rank, not parallelized, the same Trainer and the whole batch; "
        f"{job.dtype}, {options.steps} steps"
    )
    yield "reference", text
    text = (
        f"Trainer.train_step of TorchTitan {metadata.version('torchtitan')}, by the backend "
        f"{parallelism.spmd_backend}"
    )
    yield "runs", text
    if plan.smaller:
        yield "smaller", ", ".join(plan.smaller)
    for name in stand_ins(plan, job, options):
        yield "replaced", f"{name}: {STAND_INS[name]}"


def stand_ins(plan: TitanPlan, job: TitanJob, options: Options) -> Iterator[str]:
    """The names of what stands in for something in this job."""
    yield from ("device", "data", "weights", "order")
    if plan.is_other_backend:
        yield "backend"
    if options.processes:
        yield "sums"
    if job.dtype == "float64":
        yield "numbers"
    yield from kernels_of(plan)
