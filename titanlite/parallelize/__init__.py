"""Turn a plain model into its parallel form, one step after the other in one order: STEPS.

Pipeline parallelism stands outside: it cuts the model first, and each part goes through the same
steps (pipeline_parallel.py).

Each step takes only what it needs and can be called by hand; `parallelize` turns a job's
configuration into their arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from titanlite.batch import Batch
from titanlite.mesh.device_mesh import Meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.parallelize import steps
from titanlite.parallelize.activation_checkpoint import RecomputationReport, apply_ac
from titanlite.parallelize.compile import apply_compile
from titanlite.parallelize.context_parallel import apply_cp
from titanlite.parallelize.ddp import apply_ddp
from titanlite.parallelize.float8 import apply_float8
from titanlite.parallelize.float8_gather import gather_in_float8, precompute_scales
from titanlite.parallelize.fsdp import apply_fsdp
from titanlite.parallelize.pipeline_parallel import PipelineRunner, split_model
from titanlite.parallelize.plan import ParallelPlan, find_blocks, find_plan
from titanlite.parallelize.steps import DTYPES, Part
from titanlite.parallelize.tensor_parallel import apply_tp
from titanlite.plan_row import PlanRow
from titanlite.schedule import walk

if TYPE_CHECKING:
    # By hand, no step needs the configuration.
    from titanlite.config.pipeline import PipelinePlan
    from titanlite.config.schema import JobConfig

__all__ = [
    "DTYPES",
    "STEPS",
    "ParallelPlan",
    "Parallelized",
    "PipelineRunner",
    "Step",
    "apply_ac",
    "apply_compile",
    "apply_cp",
    "apply_ddp",
    "apply_float8",
    "apply_fsdp",
    "apply_tp",
    "find_blocks",
    "find_plan",
    "gather_in_float8",
    "parallelize",
    "precompute_scales",
    "split_and_parallelize",
    "split_model",
]


@dataclass(frozen=True)
class Step:
    """One step: what does it, and why it stands where it does."""

    apply: Callable[[Part], PlanRow]
    why_here: str


STEPS = (
    Step(steps.float8, "it changes what a linear layer is, which all others then work on"),
    Step(
        steps.tensor_parallel, "its plan names the model's own modules, before wrappers rename them"
    ),
    Step(
        steps.async_tensor_parallel,
        "it says what of TP overlaps, and asks the compiler for the rest before that runs",
    ),
    Step(
        steps.context_parallel,
        "it replaces the attention inside each block, before blocks are wrapped",
    ),
    Step(steps.activation_checkpoint, "it wraps blocks whose insides are cut already"),
    Step(steps.compile_blocks, "around it, so that what is recomputed is part of the graph"),
    Step(steps.data_parallel, "last, so that its hooks stay outside the compiled blocks"),
)
"""The order in which every model, and every stage of one, is made parallel."""


def parallelize(
    model: nn.Module,
    config: JobConfig,
    dims: ParallelDims,
    meshes: Meshes,
    plan: ParallelPlan | None = None,
    *,
    whole: nn.Module | None = None,
) -> tuple[list[PlanRow], RecomputationReport]:
    """Apply every step that `config` asks for to `model`, in place; say what each did.

    The model may be on the "meta" device; it gets storage and values afterwards. The plan is the
    one registered for its class unless given. Where the model is a part of one, `whole` is that
    one: a module that the part lacks and the whole has is no mistake in the plan.
    """
    part = Part(model, config, dims, meshes, plan or find_plan(model), whole)
    rows = [step.apply(part) for step in STEPS]
    return rows, part.recomputation


@dataclass
class Parallelized:
    """A model in its parallel form: this rank's parts of it, and what was done to them.

    One part without pipeline parallelism, and no pipeline.
    """

    parts: list[nn.Module]
    pipeline: PipelineRunner | None
    applied: list[PlanRow]
    recomputation: RecomputationReport


def split_and_parallelize(
    model: nn.Module,
    config: JobConfig,
    dims: ParallelDims,
    meshes: Meshes,
    pipeline_plan: PipelinePlan | None,
    example: Batch,
    plan: ParallelPlan | None = None,
) -> Parallelized:
    """Cut `model`, on "meta", into the stages of `pipeline_plan`; `parallelize` this rank's.

    Without a pipeline plan the model is the one part. `example` is a microbatch as this rank gets
    them, of which a pipeline uses the shapes; `plan` is the one registered for the model's class
    unless given.
    """
    plan = plan or find_plan(model)
    if pipeline_plan is None or meshes.pp is None:
        applied, report = parallelize(model, config, dims, meshes, plan)
        return Parallelized(
            [model], None, [PlanRow("pipeline parallel", "off", "off"), *applied], report
        )
    plain_parts = split_model(model, pipeline_plan.stages)
    stages = pipeline_plan.stages_of(meshes.pp.get_local_rank())
    parts = {stage: copy.deepcopy(plain_parts[stage]) for stage in stages}
    done = {
        stage: parallelize(part, config, dims, meshes, plan, whole=model)
        for stage, part in parts.items()
    }
    pipeline = PipelineRunner(
        pipeline_plan.schedule,
        parts,
        plain_parts,
        meshes.pp,
        example=example,
        dtype=DTYPES[config.training.param_dtype],
        num_shards=dims.tp,
        sequence_dim=plan.sequence_dim,
        from_table=pipeline_plan.is_from_file,
    )
    rows = [_pipeline_parallel(pipeline_plan, dims), *done[stages[0]][0]]
    splits = pipeline_plan.schedule.splits_backward
    for index, row in enumerate(rows[1:], start=1):
        if row.active != "off":
            notes = [row.note] if row.note else []
            if row.feature == "activation checkpoint" and splits:
                # Measured: 10 forward passes of a block in place of 4, for two blocks a stage.
                notes.append("under a split backward pass blocks are recomputed twice and more")
            note = f"stage {stages[0]}: {'; '.join(notes)}"
            rows[index] = replace(row, note=note)
    reports = [report for _, report in done.values()]
    recomputation = RecomputationReport(
        tuple(name for report in reports for name in report.wrapped),
        next((report.tally for report in reports if report.wrapped), None),
    )
    return Parallelized(list(parts.values()), pipeline, rows, recomputation)


def _pipeline_parallel(plan: PipelinePlan, dims: ParallelDims) -> PlanRow:
    schedule = plan.schedule
    bubbles = walk(schedule).bubbles()
    blocks = [sum("." in name for name in stage) for stage in plan.stages]
    note = (
        f"{schedule.name}, {schedule.num_microbatches} microbatches of {plan.microbatch_size}; "
        f"blocks a stage: {', '.join(map(str, blocks))}; "
        f"bubble {sum(bubbles) / len(bubbles):.0%} were stages equal"
    )
    return PlanRow("pipeline parallel", f"PP {dims.pp}", f"PP {dims.pp}", note)


def uses_loss_parallel(config: JobConfig, dims: ParallelDims) -> bool:
    """Whether the loss is computed on logits that are sharded over the vocabulary."""
    return dims.tp > 1 and not config.parallelism.disable_loss_parallel
