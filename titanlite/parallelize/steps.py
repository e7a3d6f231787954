"""The parallelize steps of a job, in the order of STEPS, with arguments from its configuration.

Each step calls its apply_x and returns its row of the effective plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from titanlite.config.pipeline import PipelinePlan
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError
from titanlite.mesh.device_mesh import Meshes
from titanlite.mesh.parallel_dims import ParallelDims, axes_where
from titanlite.modules.attention import explain_choice
from titanlite.modules.batch import Batch, takes
from titanlite.modules.experts import expert_layers
from titanlite.modules.tied import find_tied
from titanlite.parallelize.activation_checkpoint.apply import RecomputationReport, apply_ac
from titanlite.parallelize.async_tensor_parallel.apply import (
    describe_rings,
    enable_symmetric_memory,
    has_ring_styles,
)
from titanlite.parallelize.compile.apply import apply_compile
from titanlite.parallelize.context_parallel.apply import apply_cp
from titanlite.parallelize.ddp.apply import apply_ddp
from titanlite.parallelize.expert_parallel.apply import apply_ep
from titanlite.parallelize.float8.apply import apply_float8, compact, describe_skipped
from titanlite.parallelize.float8.linear import has_hardware
from titanlite.parallelize.fsdp.apply import apply_fsdp, can_pin
from titanlite.parallelize.pipeline_parallel.apply import PipelineRunner, split_model
from titanlite.parallelize.plan import (
    ParallelPlan,
    block_lists,
    find_blocks,
    find_plan,
    match_modules,
)
from titanlite.parallelize.tensor_parallel.apply import apply_tp
from titanlite.plan_row import PlanRow
from titanlite.schedule import walk

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Hardware:
    """What a device can do: whether it pins CPU memory, and has float8 units for a dtype."""

    can_pin: Callable[[str], bool] = can_pin
    has_float8: Callable[[torch.device | str, torch.dtype, str], bool] = has_hardware


@dataclass
class Part:
    """A model or pipeline stage during the steps, with what the steps need of the job."""

    model: nn.Module
    config: JobConfig
    dims: ParallelDims
    meshes: Meshes
    plan: ParallelPlan
    whole: nn.Module | None
    ddp: Callable[..., int] = apply_ddp
    hardware: Hardware = field(default_factory=Hardware)
    recomputation: RecomputationReport = field(default_factory=lambda: RecomputationReport(()))
    rings: Mapping[str, str] = field(default_factory=dict)


def float8(part: Part) -> PlanRow:
    """Convert linear layers to float8."""
    config, dims, meshes = part.config, part.dims, part.meshes
    section = config.quantize.linear.float8
    if not config.converts_to_float8:
        return PlanRow("float8", "off", "off")
    recipe = section.recipe
    report = apply_float8(
        part.model,
        recipe,
        filter_fqns=section.filter_fqns,
        emulate=section.emulate,
        has_units=part.hardware.has_float8,
        token_mesh=meshes.dp,
        tp_mesh=meshes.tp,
        whole=part.whole,
    )
    total = len(report.converted) + len(report.skipped)
    notes = [f"{len(report.converted)} of {total} linear layers"]
    if report.converted:
        notes[0] += f": {', '.join(compact(report.converted))}"
    if report.skipped:
        notes.append(f"skipped: {describe_skipped(report.skipped)}")
    dtype, device = config.training.param_dtype, meshes.world.device_type
    if section.emulate:
        notes.append("products emulated")
    elif part.hardware.has_float8(device, DTYPES[dtype], recipe):
        notes.append("products by torch._scaled_mm")
    else:
        notes.append(f"products emulated: {device} has none for {recipe} in {dtype}")
    if section.enable_fsdp_float8_all_gather:
        notes.append(
            "weights gathered in float8"
            + (", scales precomputed" if section.precompute_float8_dynamic_scale_for_fsdp else "")
            if dims.fsdp_enabled
            else "no weight is sharded, so none is gathered"
        )
    together = config.training.local_batch_size
    if dims.pp_enabled:
        together = config.parallelism.pipeline_parallel_microbatch_size
    notes.append(f"scales over the {together * dims.dp} sequences of a microbatch on all ranks")
    return PlanRow("float8", recipe, recipe if report.converted else "off", "; ".join(notes))


def tensor_parallel(part: Part) -> PlanRow:
    """Shard modules over the tp axis."""
    config, meshes, plan, whole = part.config, part.meshes, part.plan, part.whole
    degree = config.parallelism.tensor_parallel_degree
    if meshes.tp is None:
        return PlanRow("tensor parallel", "off", "off")
    loss_parallel = not config.parallelism.disable_loss_parallel
    elsewhere = {
        pattern
        for pattern in (*plan.tensor_parallel, *plan.loss_parallel)
        if whole is not None and match_modules(whole, pattern)
    }
    report = apply_tp(
        part.model,
        meshes.tp,
        plan,
        loss_parallel=loss_parallel,
        rings=config.parallelism.overlap_backend(meshes.tp.device_type) == "ring",
        known_unmatched=frozenset(elsewhere),
    )
    part.rings = report.rings
    unmatched = [pattern for pattern in report.unmatched if pattern not in elsewhere]
    notes = [f"{len(report.parallelized)} modules"]
    if plan.sequence_dim is not None:
        notes[0] += ", sequence parallel"
    notes.append("loss parallel" if loss_parallel else "logits gathered")
    if report.replicated:
        notes.append(f"replicated, with fewer rows than ranks: {', '.join(report.replicated)}")
    if unmatched:
        notes.append(f"plan keys without a module: {', '.join(unmatched)}")
    return PlanRow("tensor parallel", f"TP {degree}", f"TP {meshes.tp.size()}", "; ".join(notes))


def async_tensor_parallel(part: Part) -> PlanRow:
    """Overlap the communication over the tp axis with matrix products."""
    meshes, plan, whole = part.meshes, part.plan, part.whole
    device = None if meshes.tp is None else meshes.tp.device_type
    backend = None if device is None else part.config.parallelism.overlap_backend(device)
    enable_symmetric_memory(meshes.tp if backend == "symmetric_memory" else None)
    feature = "async tensor parallel"
    if backend is None or meshes.tp is None:
        return PlanRow(feature, "off", "off")
    if backend == "symmetric_memory":
        note = "inductor fuses on symmetric memory; fusions are reported after the first step"
        return PlanRow(feature, "symmetric memory", "symmetric memory", note)
    note = describe_rings(part.rings)
    if not part.rings:
        if whole is None or not has_ring_styles(whole, plan):
            raise ConfigError(
                "parallelism.enable_async_tensor_parallel: the tensor-parallel plan of "
                f"{type(part.model).__name__} has no style that can overlap; set it to false, or "
                "shard linear layers with GatherColwise and RowwiseLocal"
            )
        note = "this stage has nothing to overlap"
    return PlanRow(feature, "ring", "ring" if part.rings else "off", note)


def expert_parallel(part: Part) -> PlanRow:
    """Spread experts over ranks."""
    meshes, dims = part.meshes, part.dims
    feature = "expert parallel"
    count = apply_ep(
        part.model,
        meshes.ep,
        tp_mesh=meshes.tp,
        cp_mesh=meshes.cp,
        plan=part.plan,
    )
    known = expert_layers([part.whole or part.model])
    if not known:
        return PlanRow(feature, "off", "off")
    number = next(iter(known.values())).num_experts
    blocks = f"{count} blocks of {number} experts"
    replicas = dims.dp_replicate
    if meshes.experts is None:
        return PlanRow(feature, "off", "off")
    shards = dims.num_expert_shards
    notes = [blocks]
    if dims.ep_enabled:
        notes.append(f"{number // dims.ep} on each rank of ep")
    else:
        notes.append("not cut by tp")
    if shards > 1:
        notes.append(f"each expert sharded {shards} ways by FSDP2")
    if replicas > 1:
        notes.append(f"{replicas} replicas")
    name = f"EP {dims.ep}" if dims.ep_enabled else "off"
    return PlanRow(feature, name, name if count else "off", "; ".join(notes))


def context_parallel(part: Part) -> PlanRow:
    """Shard sequences over the cp axis, with ring attention."""
    model, config, meshes = part.model, part.config, part.meshes
    if meshes.cp is None:
        return PlanRow("context parallel", "off", "off")
    parallelism = config.parallelism
    layout, rotation = (
        parallelism.context_parallel_load_balancer,
        parallelism.context_parallel_rotate_method,
    )
    count = apply_cp(model, meshes.cp, layout=layout, rotate_method=rotation, plan=part.plan)
    dtype = DTYPES[config.training.param_dtype]
    model_config: Any = getattr(model, "config", None)
    inputs = meshes.cp.device_type, dtype, getattr(model_config, "head_dim", 64)
    name = f"CP {meshes.cp.size()}"
    note = f"{count} blocks, {layout} layout, {rotation}; {explain_choice(*inputs)}"
    masked = explain_choice(*inputs, masked=True)
    if takes(model, "documents") and masked != explain_choice(*inputs):
        note += f"; blocks with several documents: {masked}"
    return PlanRow("context parallel", name, name, note)


def activation_checkpoint(part: Part) -> PlanRow:
    """Save fewer activations and recompute the others."""
    model, config, dims = part.model, part.config, part.dims
    section = config.activation_checkpoint
    compiled = config.compile.enable and "model" in config.compile.components
    # Needed if AOTAutograd traces the CPU operator's recomputation in a graph with DTensors.
    cut = dims.tp > 1 and dims.cp == 1
    save_cpu_attention = compiled and cut and section.mode in ("full", "selective")
    requested: str = section.mode
    if section.mode == "selective":
        requested += f" {section.selective_ac_option}"
    is_default = "mode" not in section.model_fields_set
    if is_default and part.plan.blocks is None and section.mode != "none":
        why = "it is on by default, and works on blocks"
        return PlanRow("activation checkpoint", requested, "off", why)
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
        plan=part.plan,
    )
    part.recomputation = report
    if section.mode == "none":
        return PlanRow("activation checkpoint", "off", "off")
    if section.mode == "memory_budget":
        note = f"the compiler may use {section.memory_budget:.0%} of the memory of saving all"
        return PlanRow("activation checkpoint", requested, requested, note)
    notes = [f"{len(report.wrapped)} of {len(find_blocks(model, part.plan))} blocks"]
    if save_cpu_attention and report.tally is None:
        notes.append("the CPU attention operator's output is saved, which compile with TP needs")
    active = requested if report.wrapped else "off"
    return PlanRow("activation checkpoint", requested, active, "; ".join(notes))


def compile_blocks(part: Part) -> PlanRow:
    """Compile block by block."""
    section = part.config.compile
    requested = " + ".join(section.components) if section.enable else "off"
    if not section.enable:
        return PlanRow("compile", requested, "off")
    notes = []
    if "model" in section.components:
        notes.append(f"{apply_compile(part.model, backend=section.backend, plan=part.plan)} blocks")
    if "loss" in section.components:
        notes.append("the loss")
    return PlanRow("compile", requested, requested, f"{' and '.join(notes)} with {section.backend}")


def data_parallel(part: Part) -> PlanRow:
    """Shard with FSDP2, or replicate with DDP."""
    model, config, dims, meshes = part.model, part.config, part.dims, part.meshes
    training, parallelism = config.training, config.parallelism
    param, reduce = training.param_dtype, training.reduce_dtype
    is_mixed = training.is_mixed
    asked = dims.degree_of(axes_where(batch="samples", weights="sharded"))
    requested = _data_parallel_name(dims.dp_replicate, asked)
    is_plain = not is_mixed and not training.enable_cpu_offload
    if not dims.uses_fsdp(is_plain=is_plain, has_experts=meshes.experts is not None):
        if dims.dp_replicate == 1:
            return PlanRow("data parallel", requested, "off")
        bucket = part.ddp(model, meshes.dp["dp_replicate"], compiled=config.compile.enable)
        return PlanRow("data parallel", requested, requested, f"buckets of {bucket} MB")
    own_shards = meshes.experts is not None and dims.num_expert_shards > 1
    pins = training.cpu_offload_pin_memory and part.hardware.can_pin(meshes.world.device_type)
    units = apply_fsdp(
        model,
        meshes.dp,
        param_dtype=DTYPES[param] if is_mixed else None,
        reduce_dtype=DTYPES[reduce] if is_mixed else None,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        pipelined=dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        pin_memory=pins,
        expert_mesh=meshes.expert_dp,
        plan=part.plan,
    )
    num_shards = dims.num_weight_shards
    active = _data_parallel_name(dims.dp_replicate, num_shards)
    notes = ["1 unit" if units == 1 else f"{units} units"]
    notes.append(f"reshard after forward: {parallelism.fsdp_reshard_after_forward}")
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
                (f"experts sharded over the {dims.num_expert_shards} ranks of efsdp", own_shards),
            )
            if applies
        ]
        notes.insert(0, f"FSDP2 with one shard, for {', '.join(reasons)}")
    if is_mixed:
        notes.append(f"computes in {param}, reduces in {reduce}")
    if training.enable_cpu_offload:
        notes.append(f"parameters on the CPU, {'pinned' if pins else 'not pinned'}")
    return PlanRow("data parallel", requested, active, "; ".join(notes))


def _data_parallel_name(num_replicas: int, num_shards: int) -> str:
    if num_shards == 1:
        return "off" if num_replicas == 1 else f"DDP {num_replicas}"
    return f"FSDP {num_shards}" if num_replicas == 1 else f"HSDP {num_replicas} x {num_shards}"


@dataclass(frozen=True)
class Step:
    """One step: the function that applies it, and the reason for its place in the order."""

    apply: Callable[[Part], PlanRow]
    why_here: str


STEPS = (
    Step(float8, "it replaces linear layers, which all other steps then work on"),
    Step(tensor_parallel, "its plan names the model's own modules, before wrappers rename them"),
    Step(
        async_tensor_parallel,
        "it reports which TP modules are rings, and configures the compiler before it runs",
    ),
    Step(
        expert_parallel,
        "it distributes the experts, which no other step cuts, before blocks are wrapped",
    ),
    Step(
        context_parallel,
        "it replaces the attention inside each block, before blocks are wrapped",
    ),
    Step(activation_checkpoint, "it wraps blocks whose modules are already sharded"),
    Step(compile_blocks, "after it, so that recomputation is part of the compiled graph"),
    Step(data_parallel, "last, so that its hooks stay outside the compiled blocks"),
)
"""The steps in the order in which they are applied to every model and every pipeline stage."""


def parallelize(
    model: nn.Module,
    config: JobConfig,
    dims: ParallelDims,
    meshes: Meshes,
    plan: ParallelPlan | None = None,
    *,
    whole: nn.Module | None = None,
    ddp: Callable[..., int] = apply_ddp,
    hardware: Hardware | None = None,
) -> tuple[list[PlanRow], RecomputationReport]:
    """Apply every step that `config` enables to `model`, in place.

    Returns one row of the effective plan per step, and the report of activation checkpointing. The
    model may be on the "meta" device, and get storage and values later. `plan` defaults to the one
    registered for the model's class. For a pipeline stage, `whole` is the whole model: the plan may
    name modules that only the whole model has. `ddp` replicates a model where apply_ddp would.
    """
    part = Part(model, config, dims, meshes, plan or find_plan(model), whole, ddp)
    part.hardware = hardware or part.hardware
    rows = [step.apply(part) for step in STEPS]
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
    model: nn.Module,
    config: JobConfig,
    dims: ParallelDims,
    meshes: Meshes,
    pipeline_plan: PipelinePlan | None,
    example: Batch,
    plan: ParallelPlan | None = None,
    ddp: Callable[..., int] = apply_ddp,
    hardware: Hardware | None = None,
) -> Parallelized:
    """Split `model` into the stages of `pipeline_plan` and `parallelize` those of this rank.

    The model is on the "meta" device. Without a pipeline plan it is the only part. `example` is one
    of this rank's microbatches; the pipeline uses only its shapes. `plan` defaults to the one
    registered for the model's class.
    """
    plan = plan or find_plan(model)
    if pipeline_plan is None or meshes.pp is None:
        has_blocks = plan.blocks is None or find_blocks(model, plan)
        found = [] if has_blocks and not plan.is_derived else [_blocks_row(model, plan)]
        applied, report = parallelize(model, config, dims, meshes, plan, ddp=ddp, hardware=hardware)
        off = PlanRow("pipeline parallel", "off", "off")
        return Parallelized([model], None, [*found, off, *applied], report)
    tied = find_tied(model)
    plain_parts = split_model(model, pipeline_plan.stages, plan.stage_forward)
    stages = pipeline_plan.stages_of(meshes.pp.get_local_rank())
    parts = {stage: copy.deepcopy(plain_parts[stage]) for stage in stages}
    done = {
        stage: parallelize(
            part, config, dims, meshes, plan, whole=model, ddp=ddp, hardware=hardware
        )
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
    bubbles = walk(schedule).bubbles()
    blocks = [sum("." in name for name in stage) for stage in plan.stages]
    note = (
        f"{schedule.name}, {schedule.num_microbatches} microbatches of {plan.microbatch_size}; "
        f"blocks per stage: {', '.join(map(str, blocks))}; "
        f"bubble {sum(bubbles) / len(bubbles):.0%} if all stages take equal time"
    )
    return PlanRow("pipeline parallel", f"PP {dims.pp}", f"PP {dims.pp}", note)


def uses_loss_parallel(config: JobConfig, dims: ParallelDims) -> bool:
    """Whether the loss is computed on logits that are sharded over the vocabulary."""
    return dims.tp > 1 and not config.parallelism.disable_loss_parallel
