"""Apply the steps that a job asks for, to a model or to the stages of a pipeline."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

from torch import nn

from titanlite.config.pipeline import PipelinePlan
from titanlite.config.resolve import ResolvedJob
from titanlite.config.schema import JobConfig
from titanlite.mesh.device_mesh import Meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.modules.batch import Batch
from titanlite.modules.tied import find_tied
from titanlite.parallelize.activation_checkpoint.apply import RecomputationReport
from titanlite.parallelize.ddp.apply import DDPReport, apply_ddp
from titanlite.parallelize.feature import Feature
from titanlite.parallelize.part import DTYPES, FeatureStep, Part
from titanlite.parallelize.pipeline_parallel.apply import PipelineRunner, split_model
from titanlite.parallelize.plan import ParallelPlan, block_lists, find_blocks, find_plan
from titanlite.parallelize.steps import STEPS
from titanlite.plan_row import PlanRow
from titanlite.schedule import bubbles, run_schedule


def step_of(feature: Feature) -> FeatureStep:
    """What the step of a feature does: STEP of the step.py in its folder."""
    step = import_module(f"titanlite.parallelize.{feature.folder}.step").STEP
    assert isinstance(step, FeatureStep)
    return step


def parallelize(
    model: nn.Module,
    config: JobConfig,
    dims: ParallelDims,
    meshes: Meshes,
    plan: ParallelPlan | None = None,
    *,
    whole: nn.Module | None = None,
    ddp: Callable[..., DDPReport] = apply_ddp,
) -> tuple[list[PlanRow], RecomputationReport]:
    """Apply every step that `config` enables to `model`, in place.

    Returns one row of the effective plan per step, and the report of activation checkpointing. The
    model may be on the "meta" device, and get storage and values later. `plan` defaults to the one
    registered for the model's class. For a pipeline stage, `whole` is the whole model: the plan may
    name modules that only the whole model has. `ddp` replicates a model where apply_ddp would.
    """
    part = Part(model, config, dims, meshes, plan or find_plan(model), whole, ddp)
    rows = [
        step_of(feature).apply(part)
        if feature.is_on(config)
        else PlanRow(feature.name, "off", "off")
        for feature in STEPS
    ]
    return rows, part.recomputation


@dataclass
class Parallelized:
    """A parallelized model: this rank's parts and what was applied to them.

    Without pipeline parallelism there is one part and `pipeline` is None.
    """

    parts: list[nn.Module]
    pipeline: PipelineRunner | None
    applied: list[PlanRow]
    recomputation: RecomputationReport


def split_and_parallelize(
    resolved: ResolvedJob,
    meshes: Meshes,
    model: nn.Module,
    plan: ParallelPlan,
    example: Batch,
    ddp: Callable[..., DDPReport] = apply_ddp,
) -> Parallelized:
    """Split `model` into the stages of the job's pipeline and `parallelize` those of this rank.

    The model is on the "meta" device. Without a pipeline it is the only part. `example` is one of
    this rank's microbatches; the pipeline uses only its shapes.
    """
    config, dims, pipeline_plan = resolved.config, resolved.dims, resolved.pipeline
    if pipeline_plan is None or meshes.pp is None:
        has_blocks = plan.blocks is None or find_blocks(model, plan)
        found = [] if has_blocks and not plan.is_derived else [_blocks_row(model, plan)]
        applied, report = parallelize(model, config, dims, meshes, plan, ddp=ddp)
        off = PlanRow("pipeline parallel", "off", "off")
        return Parallelized([model], None, [*found, off, *applied], report)
    tied = find_tied(model)
    plain_parts = split_model(model, pipeline_plan.stages, plan.stage_forward)
    stages = pipeline_plan.stages_of(meshes.pp.get_local_rank())
    parts = {stage: copy.deepcopy(plain_parts[stage]) for stage in stages}
    done = {
        stage: parallelize(part, config, dims, meshes, plan, whole=model, ddp=ddp)
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
        tied=tied,
    )
    rows = [_pipeline_parallel(pipeline_plan, dims), *done[stages[0]][0]]
    splits = pipeline_plan.schedule.splits_backward
    for index, row in enumerate(rows[1:], start=1):
        if row.active != "off":
            notes = [row.note] if row.note else []
            if row.feature == "activation checkpoint" and splits:
                # Measured with two blocks per stage: 10 forward passes of a block instead of 4.
                notes.append("a split backward pass recomputes blocks more than once")
            note = f"stage {stages[0]}: {'; '.join(notes)}"
            rows[index] = replace(row, note=note)
    reports = [report for _, report in done.values()]
    recomputation = RecomputationReport(
        tuple(name for report in reports for name in report.wrapped),
        next((report.tally for report in reports if report.wrapped), None),
    )
    return Parallelized(list(parts.values()), pipeline, rows, recomputation)


def _blocks_row(model: nn.Module, plan: ParallelPlan) -> PlanRow:
    """The blocks of a plain model that nobody has named, or not rightly."""
    lists = block_lists(model)
    known = ", ".join(f"{name} ({what})" for name, what in lists.items())
    if not plan.is_derived:
        note = "the model has no such module" + (f"; its lists are {known}" if known else "")
        return PlanRow("blocks", str(plan.blocks), "none", note)
    if plan.blocks is not None:
        name = plan.blocks or type(model).__name__
        return PlanRow("blocks", name, name, f"found without a plan: {lists[name]}")
    note = "there is no plan, and the model has no list of blocks"
    if lists:
        note = f"there is no plan, and several lists may be the blocks: {known}"
    return PlanRow("blocks", "a list", "none", note)


def _pipeline_parallel(plan: PipelinePlan, dims: ParallelDims) -> PlanRow:
    schedule = plan.schedule
    idle = bubbles(schedule.num_ranks, run_schedule(schedule))
    blocks = [sum("." in name for name in stage) for stage in plan.stages]
    note = (
        f"{schedule.name}, {schedule.num_microbatches} microbatches of {plan.microbatch_size}; "
        f"blocks per stage: {', '.join(map(str, blocks))}; "
        f"bubble {sum(idle) / len(idle):.0%} if all stages take equal time"
    )
    return PlanRow("pipeline parallel", f"PP {dims.pp}", f"PP {dims.pp}", note)


def uses_loss_parallel(config: JobConfig, dims: ParallelDims) -> bool:
    """Whether the loss is computed on logits that are sharded over the vocabulary."""
    return dims.tp > 1 and not config.parallelism.disable_loss_parallel
