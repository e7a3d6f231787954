"""Float8 as a step: its row of the effective plan, its check of a model, and its gathers."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.parallelize.float8.apply import (
    apply_float8,
    choose_layers,
    compact,
    describe_skipped,
    none_left,
    refused_shapes,
)
from titanlite.parallelize.float8.gather import gather_in_float8, precompute_scales
from titanlite.parallelize.float8.linear import has_hardware
from titanlite.parallelize.float8.spec import SECTION, Float8Section
from titanlite.parallelize.part import DTYPES, FeatureStep, Part
from titanlite.parallelize.plan import ParallelPlan
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
    config, dims, meshes = part.config, part.dims, part.meshes
    section = config.section(Float8Section)
    recipe = section.recipe
    report = apply_float8(
        part.model,
        recipe,
        filter_fqns=section.filter_fqns,
        emulate=section.emulate,
        token_mesh=None if section.local_scales else meshes.tokens or meshes.dp,
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
    elif has_hardware(device, DTYPES[dtype], recipe):
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
    notes.append(
        "scales of each rank's own tokens, so the numbers depend on the plan"
        if section.local_scales
        else f"scales over the {together * dims.dp} sequences of a microbatch on all ranks"
    )
    return PlanRow("float8", recipe, recipe if report.converted else "off", "; ".join(notes))


def check_model(
    model: nn.Module, plan: ParallelPlan, config: JobConfig, dims: ParallelDims
) -> None:
    """Raises ConfigError if float8 has no layer to convert, or refuses a layer's shape."""
    section = config.section(Float8Section)
    chosen, skipped = choose_layers(model, section.recipe, section.filter_fqns)
    if not chosen:
        raise ConfigError(
            f"model.converters: {none_left(type(model).__name__, skipped)}; change "
            f"{SECTION}.filter_fqns or the model's sizes, or remove the converter"
        )
    if dims.tp == 1 or section.emulate:
        return
    if refused := refused_shapes(model, plan, chosen, dims.tp):
        raise ConfigError(
            f"parallelism.tensor_parallel_degree: {refused}; give a smaller degree, name the layer "
            f"in {SECTION}.filter_fqns, or set {SECTION}.emulate = true"
        )


def finish(config: JobConfig, parts: list[nn.Module], optimizer: Optimizer) -> None:
    """Make FSDP2 all-gather in float8 and precompute scales, if the job asks for it."""
    section = config.section(Float8Section)
    if not section.enable_fsdp_float8_all_gather:
        return
    for part in parts:
        gather_in_float8(part)
    if section.precompute_float8_dynamic_scale_for_fsdp:

        def precompute(*_: Any) -> None:
            for part in parts:
                precompute_scales(part)

        optimizer.register_step_post_hook(precompute)


STEP = FeatureStep(apply, check_model, finish)
