"""Activation checkpointing as a step: its row of the effective plan."""

from titanlite.parallelize.activation_checkpoint.apply import apply_ac
from titanlite.parallelize.part import FeatureStep, Part
from titanlite.parallelize.plan import find_blocks
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
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
    if is_default and part.plan.blocks is None:
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
    if section.mode == "memory_budget":
        note = f"the compiler may use {section.memory_budget:.0%} of the memory of saving all"
        return PlanRow("activation checkpoint", requested, requested, note)
    notes = [f"{len(report.wrapped)} of {len(find_blocks(model, part.plan))} blocks"]
    if save_cpu_attention and report.tally is None:
        notes.append("the CPU attention operator's output is saved, which compile with TP needs")
    active = requested if report.wrapped else "off"
    return PlanRow("activation checkpoint", requested, active, "; ".join(notes))


STEP = FeatureStep(apply)
