"""torchao's float8 recipes, imported without its log messages.

On import torchao logs libraries built for other machines and a deprecation in torch. Neither
concerns a job.
"""

import logging
from dataclasses import dataclass
from types import ModuleType

import torch

from titanlite.errors import ConfigError

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@dataclass(frozen=True)
class Recipe:
    """How the operands of a linear layer's three products are scaled and cast.

    Rowwise: one scale per row of an operand, from the largest magnitude along the dimension that
    the product sums over. Tensorwise: one scale per operand.
    """

    name: str
    rowwise: bool
    """Whether inputs, weights and output gradients have a scale per row instead of one scale."""
    rowwise_weight_for_input: bool
    """The same for the weight in the product that computes the input's gradient."""
    casts_for_weight: bool
    """Whether the product that computes the weight's gradient has float8 operands."""
    gradient_dtype: torch.dtype
    """The float8 dtype of output gradients; inputs and weights have `dtype`."""
    dtype: torch.dtype
    power_of_two: bool
    """Whether scales are rounded down to a power of two."""
    fast_accumulation: bool
    """Whether hardware may accumulate the forward product in lower precision."""


def load_torchao() -> ModuleType:
    """Import torchao.float8; raises ConfigError if it is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.float8

        # Inductor's minimum and maximum break Triton's float8 stores. torchao applies this patch
        # only to models that it converts itself.
        from torchao.float8 import _inductor_patch

        if torch.cuda.is_available():
            _inductor_patch._patch_inductor_min_max_codegen()
    except ImportError as error:
        raise ConfigError(
            f"model.converters: float8 needs torchao, which cannot be imported ({error}); "
            'pip install "titanlite[float8]"'
        ) from error
    finally:
        logging.disable(before)
    return torchao.float8


def find_recipe(name: str) -> Recipe:
    """torchao's recipe `name`, one of RECIPES."""
    config = load_torchao().Float8LinearConfig.from_recipe_name(name)

    def is_rowwise(cast: object) -> bool:
        return getattr(cast, "scaling_granularity").value == "axiswise"  # noqa: B009

    return Recipe(
        name=name,
        rowwise=is_rowwise(config.cast_config_input),
        rowwise_weight_for_input=is_rowwise(config.cast_config_weight_for_grad_input),
        casts_for_weight=config.cast_config_input_for_grad_weight.scaling_type.value != "disabled",
        gradient_dtype=config.cast_config_grad_output.target_dtype,
        dtype=config.cast_config_weight.target_dtype,
        power_of_two=config.round_scales_to_power_of_2,
        fast_accumulation=config.gemm_config_output.use_fast_accum,
    )
