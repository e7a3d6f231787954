"""LoRA as a step: it changes the plain model; its row of the effective plan."""

from torch import nn

from titanlite.config import load_model_spec, make_model_config
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError, TitanliteError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.hf_format import format_of
from titanlite.modules.lora import LoRALinear
from titanlite.parallelize.lora.apply import apply_lora
from titanlite.parallelize.part import FeatureStep, Part
from titanlite.parallelize.plan import ParallelPlan
from titanlite.plan_row import PlanRow


def convert(model: nn.Module, plan: ParallelPlan, config: JobConfig) -> None:
    """Freeze the model and give its layers adapters."""
    section = config.lora
    try:
        apply_lora(
            model,
            section.rank,
            section.alpha,
            dropout=section.dropout,
            target_modules=section.target_modules,
            init_lora_weights=section.init_lora_weights,
            plan=plan,
        )
    except TitanliteError as error:
        raise ConfigError(f"lora.target_modules: {error}") from error


def apply(part: Part) -> PlanRow:
    """The row; the adapters are part of the plain model already."""
    section = part.config.lora
    whole = part.whole or part.model
    count = sum(isinstance(layer, LoRALinear) for layer in whole.modules())
    of_all = ", ".join(section.target_modules) or "all in the blocks"
    base = part.config.checkpoint.initial_load_path or "initial weights"
    note = f"{count} linear layers ({of_all}), scale {section.scale:g}; base: {base}"
    return PlanRow("LoRA", f"rank {section.rank}", f"rank {section.rank}", note)


def check_model(
    model: nn.Module, plan: ParallelPlan, config: JobConfig, dims: ParallelDims
) -> None:
    """Raises ConfigError if the run could not save its adapters at the end."""
    format = format_of(load_model_spec(config))
    alone = config.checkpoint.last_save_in_hf and not config.lora.save_merged
    if format is not None and alone:
        layers = {n: m for n, m in model.named_modules() if isinstance(m, LoRALinear)}
        weights = {f"{name}.weight": layer.weight.shape for name, layer in layers.items()}
        format.require_alone(weights, make_model_config(config))


STEP = FeatureStep(apply, check_model, convert=convert)
