"""Turn a plain model into its parallel form, one step after the other in one order.

1. apply_tp     first: its plan names the model's own modules.
2. apply_cp     replaces a submodule of each block, before anything is wrapped around blocks.
3. apply_ac     wraps blocks, after their insides have been cut.
4. apply_compile around it, so that what is recomputed is part of the graph.
5. apply_fsdp or apply_ddp last: their hooks stay outside the compiled blocks.

Pipeline parallelism stands outside: it cuts the model first, and each part goes through the same
steps (pipeline_parallel.py).

Each step takes only what it needs and can be called by hand; `parallelize` turns a job's
configuration into their arguments.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titanlite.attention import explain_choice
from titanlite.config.pipeline import PipelinePlan
from titanlite.config.schema import JobConfig
from titanlite.mesh.device_mesh import Meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.parallelize.activation_checkpoint import CheckpointReport, apply_ac
from titanlite.parallelize.compile import apply_compile
from titanlite.parallelize.context_parallel import apply_cp
from titanlite.parallelize.ddp import apply_ddp
from titanlite.parallelize.fsdp import apply_fsdp
from titanlite.parallelize.pipeline_parallel import Pipeline, split_model
from titanlite.parallelize.plan import ParallelPlan, find_blocks, find_plan, match_modules
from titanlite.parallelize.tensor_parallel import apply_tp
from titanlite.schedule import walk

__all__ = [
    "Applied",
    "ParallelPlan",
    "Parallelized",
    "Pipeline",
    "apply_ac",
    "apply_compile",
    "apply_cp",
    "apply_ddp",
    "apply_fsdp",
    "apply_tp",
    "find_blocks",
    "find_plan",
    "parallelize",
    "split_and_parallelize",
    "split_model",
]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass
class Applied:
    """One row of the effective plan: what was asked for, what is active, and why they differ."""

    feature: str
    requested: str
    active: str
    note: str = ""


def parallelize(
    model: nn.Module,
    config: JobConfig,
    dims: ParallelDims,
    meshes: Meshes,
    plan: ParallelPlan | None = None,
    *,
    whole: nn.Module | None = None,
) -> tuple[list[Applied], CheckpointReport]:
    """Apply every step that `config` asks for to `model`, in place; say what each did.

    The model may be on the "meta" device; it gets storage and values afterwards. The plan is the
    one registered for its class unless given. Where the model is a part of one, `whole` is that
    one: a module that the part lacks and the whole has is no mistake in the plan.
    """
    plan = plan or find_plan(model)
    applied = [_tensor_parallel(model, config, meshes, plan, whole)]
    applied.append(_context_parallel(model, config, meshes, plan))
    row, report = _activation_checkpoint(model, config, dims, plan)
    applied += [
        row,
        _compile(model, config, plan),
        _data_parallel(model, config, dims, meshes, plan),
    ]
    return applied, report


@dataclass
class Parallelized:
    """A model in its parallel form: this rank's parts of it, and what was done to them.

    One part without pipeline parallelism, and no pipeline.
    """

    parts: list[nn.Module]
    pipeline: Pipeline | None
    applied: list[Applied]
    checkpointing: CheckpointReport


def split_and_parallelize(
    model: nn.Module,
    config: JobConfig,
    dims: ParallelDims,
    meshes: Meshes,
    pipeline_plan: PipelinePlan | None,
    num_tokens: int,
    plan: ParallelPlan | None = None,
) -> Parallelized:
    """Cut `model`, on "meta", into the stages of `pipeline_plan`; `parallelize` this rank's.

    Without a pipeline plan the model is the one part. `num_tokens` are those of an image; `plan`
    is the one registered for the model's class unless given.
    """
    plan = plan or find_plan(model)
    if pipeline_plan is None or meshes.pp is None:
        applied, report = parallelize(model, config, dims, meshes, plan)
        return Parallelized(
            [model], None, [Applied("pipeline parallel", "off", "off"), *applied], report
        )
    plain_parts = split_model(model, pipeline_plan.stages)
    stages = pipeline_plan.stages_of(meshes.pp.get_local_rank())
    parts = {stage: copy.deepcopy(plain_parts[stage]) for stage in stages}
    done = {
        stage: parallelize(part, config, dims, meshes, plan, whole=model)
        for stage, part in parts.items()
    }
    pipeline = Pipeline(
        pipeline_plan.schedule,
        parts,
        plain_parts,
        meshes.pp,
        microbatch_size=pipeline_plan.microbatch_size,
        num_tokens=num_tokens // dims.num_token_shards,
        dtype=DTYPES[config.training.param_dtype],
        num_shards=dims.tp,
        sequence_dim=plan.sequence_dim,
        from_table=pipeline_plan.is_from_file,
    )
    rows = [_pipeline_parallel(pipeline_plan, dims), *done[stages[0]][0]]
    splits = pipeline_plan.schedule.splits_backward
    for row in rows[1:]:
        if row.active != "off":
            notes = [row.note] if row.note else []
            if row.feature == "activation checkpoint" and splits:
                # Measured: 10 forward passes of a block in place of 4, for two blocks a stage.
                notes.append("under a split backward pass blocks are recomputed twice and more")
            row.note = f"stage {stages[0]}: {'; '.join(notes)}"
    reports = [report for _, report in done.values()]
    checkpointing = CheckpointReport(
        tuple(name for report in reports for name in report.wrapped),
        next((report.tally for report in reports if report.wrapped), None),
    )
    return Parallelized(list(parts.values()), pipeline, rows, checkpointing)


def _pipeline_parallel(plan: PipelinePlan, dims: ParallelDims) -> Applied:
    schedule = plan.schedule
    bubbles = walk(schedule).bubbles()
    blocks = [sum("." in name for name in stage) for stage in plan.stages]
    note = (
        f"{schedule.name}, {schedule.num_microbatches} microbatches of {plan.microbatch_size}; "
        f"blocks a stage: {', '.join(map(str, blocks))}; "
        f"bubble {sum(bubbles) / len(bubbles):.0%} were stages equal"
    )
    return Applied("pipeline parallel", f"PP {dims.pp}", f"PP {dims.pp}", note)


def uses_loss_parallel(config: JobConfig, dims: ParallelDims) -> bool:
    """Whether the loss is computed on logits that are sharded over the vocabulary."""
    return dims.tp > 1 and not config.parallelism.disable_loss_parallel


def _tensor_parallel(
    model: nn.Module,
    config: JobConfig,
    meshes: Meshes,
    plan: ParallelPlan,
    whole: nn.Module | None,
) -> Applied:
    degree = config.parallelism.tensor_parallel_degree
    if meshes.tp is None:
        return Applied("tensor parallel", "off", "off")
    loss_parallel = not config.parallelism.disable_loss_parallel
    elsewhere = {
        pattern
        for pattern in (*plan.tensor_parallel, *plan.loss_parallel)
        if whole is not None and match_modules(whole, pattern)
    }
    report = apply_tp(
        model,
        meshes.tp,
        plan,
        loss_parallel=loss_parallel,
        known_unmatched=frozenset(elsewhere),
    )
    unmatched = [pattern for pattern in report.unmatched if pattern not in elsewhere]
    notes = [f"{len(report.parallelized)} modules, sequence parallel"]
    notes.append("loss parallel" if loss_parallel else "logits gathered")
    if report.replicated:
        notes.append(f"whole on every rank, having fewer rows: {', '.join(report.replicated)}")
    if unmatched:
        notes.append(f"plan keys without a module: {', '.join(unmatched)}")
    return Applied("tensor parallel", f"TP {degree}", f"TP {meshes.tp.size()}", "; ".join(notes))


def _context_parallel(
    model: nn.Module, config: JobConfig, meshes: Meshes, plan: ParallelPlan
) -> Applied:
    if meshes.cp is None:
        return Applied("context parallel", "off", "off")
    parallelism = config.parallelism
    layout, rotation = (
        parallelism.context_parallel_load_balancer,
        parallelism.context_parallel_rotate_method,
    )
    count = apply_cp(model, meshes.cp, layout=layout, rotate_method=rotation, plan=plan)
    dtype = DTYPES[config.training.param_dtype]
    model_config: Any = getattr(model, "config", None)
    kernel = explain_choice(meshes.cp.device_type, dtype, getattr(model_config, "head_dim", 64))
    name = f"CP {meshes.cp.size()}"
    note = f"{count} blocks, {layout} layout, {rotation}; {kernel}"
    return Applied("context parallel", name, name, note)


def _activation_checkpoint(
    model: nn.Module, config: JobConfig, dims: ParallelDims, plan: ParallelPlan
) -> tuple[Applied, CheckpointReport]:
    section = config.activation_checkpoint
    compiled = config.compile.enable and "model" in config.compile.components
    # Needed where AOTAutograd sees the recomputation of the CPU operator in a DTensor graph.
    cut = dims.tp > 1 and dims.cp == 1
    save_cpu_attention = compiled and cut and section.mode in ("full", "selective")
    report = apply_ac(
        model,
        section.mode,
        selective_option=section.selective_ac_option,
        recompute_mm_of=tuple(section.per_op_sac_force_recompute_mm_shapes_by_fqns),
        preserve_rng_state=section.preserve_rng_state,
        determinism_check=section.determinism_check,
        early_stop=section.early_stop,
        debug=section.debug,
        memory_budget=section.memory_budget,
        save_cpu_attention=save_cpu_attention,
        plan=plan,
    )
    requested: str = section.mode
    if section.mode == "selective":
        requested += f" {section.selective_ac_option}"
    if section.mode == "none":
        return Applied("activation checkpoint", "off", "off"), report
    if section.mode == "memory_budget":
        note = f"the compiler keeps {section.memory_budget:.0%} of what saving all would take"
        return Applied("activation checkpoint", requested, requested, note), report
    notes = [f"{len(report.wrapped)} of {len(find_blocks(model, plan))} blocks"]
    if save_cpu_attention and report.tally is None:
        notes.append("the CPU attention operator's output is saved, as compile with TP needs")
    active = requested if report.wrapped else "off"
    return Applied("activation checkpoint", requested, active, "; ".join(notes)), report


def _compile(model: nn.Module, config: JobConfig, plan: ParallelPlan) -> Applied:
    section = config.compile
    requested = " + ".join(section.components) if section.enable else "off"
    if not section.enable:
        return Applied("compile", requested, "off")
    notes = []
    if "model" in section.components:
        notes.append(f"{apply_compile(model, backend=section.backend, plan=plan)} blocks")
    if "loss" in section.components:
        notes.append("loss")
    return Applied("compile", requested, requested, f"{', '.join(notes)} by {section.backend}")


def _data_parallel(
    model: nn.Module, config: JobConfig, dims: ParallelDims, meshes: Meshes, plan: ParallelPlan
) -> Applied:
    training, parallelism = config.training, config.parallelism
    dtype = training.dtype
    param, reduce = training.param_dtype, training.reduce_dtype
    is_mixed = param != dtype or reduce != dtype
    requested = _data_parallel_name(dims.dp_replicate, dims.dp_shard)
    plain = not is_mixed and not training.enable_cpu_offload and not dims.fsdp_enabled
    # DDP cannot be told which of a schedule's backward passes is the last.
    if plain and dims.tp == 1 and dims.pp == 1:
        if dims.dp_replicate == 1:
            return Applied("data parallel", requested, "off")
        bucket = apply_ddp(model, meshes.dp["dp_replicate"], compiled=config.compile.enable)
        return Applied("data parallel", requested, requested, f"buckets of {bucket} MB")
    if plain and dims.dp == 1:
        return Applied("data parallel", requested, "off")
    units = apply_fsdp(
        model,
        meshes.dp,
        param_dtype=DTYPES[param] if is_mixed else None,
        reduce_dtype=DTYPES[reduce] if is_mixed else None,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        pipelined=dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        pin_memory=training.cpu_offload_pin_memory,
        plan=plan,
    )
    num_shards = dims.num_weight_shards
    active = _data_parallel_name(dims.dp_replicate, num_shards)
    notes = [f"{units} units", f"reshard after forward: {parallelism.fsdp_reshard_after_forward}"]
    if dims.cp_enabled:
        reason = f"the {dims.cp} ranks of cp share one set of weights, so FSDP2 shards over them"
        notes.insert(0, reason)
    if num_shards == 1:
        active = f"HSDP {dims.dp_replicate} x 1" if dims.dp_replicate > 1 else "FSDP 1"
        reasons = [
            reason
            for reason, applies in (
                ("replicas of tensor-parallel shards", dims.dp_replicate > 1 and dims.tp > 1),
                ("replicas of stages", dims.dp_replicate > 1 and dims.pp > 1 and dims.tp == 1),
                ("mixed precision", is_mixed),
                ("CPU offload", training.enable_cpu_offload),
            )
            if applies
        ]
        notes.insert(0, f"FSDP2 with one shard, for {', '.join(reasons)}")
    if is_mixed:
        notes.append(f"computes in {param}, reduces in {reduce}")
    if training.enable_cpu_offload:
        pinned = training.cpu_offload_pin_memory and torch.cuda.is_available()
        notes.append(f"parameters on the CPU, {'pinned' if pinned else 'not pinned'}")
    return Applied("data parallel", requested, active, "; ".join(notes))


def _data_parallel_name(num_replicas: int, num_shards: int) -> str:
    if num_shards == 1:
        return "off" if num_replicas == 1 else f"DDP {num_replicas}"
    return f"FSDP {num_shards}" if num_replicas == 1 else f"HSDP {num_replicas} x {num_shards}"
