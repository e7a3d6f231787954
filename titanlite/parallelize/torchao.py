"""torchao, imported in silence: its recipes for float8.

Importing it logs libraries that are made for other machines and a deprecation in torch; neither
says anything of a job.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType

import torch

from titanlite.errors import ConfigError

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@dataclass(frozen=True)
class Recipe:
    """How the operands of a linear layer's three products are scaled and cast.

    Rowwise, each row of an operand has a scale: its largest magnitude over the dimension that the
    product sums over. Tensorwise, an operand has one.
    """

    name: str
    rowwise: bool
    """Whether inputs, weights and output gradients are scaled by rows; else by one scale."""
    rowwise_weight_for_input: bool
    """The same of the weight in the product that gives the input's gradient."""
    casts_for_weight: bool
    """Whether the product that gives the weight's gradient has its operands in float8."""
    gradient_dtype: torch.dtype
    """The format of output gradients; inputs and weights have `dtype`."""
    dtype: torch.dtype
    power_of_two: bool
    """Whether scales are rounded down to a power of two."""
    fast_accumulation: bool
    """Whether hardware may sum the forward product in fewer bits."""


def load_torchao() -> ModuleType:
    """torchao.float8; raises ConfigError where it is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.float8

        # Inductor's minimum and maximum break Triton's float8 stores; torchao mends that where a
        # model is converted by it.
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
    """The recipe that torchao has under `name`, one of RECIPES."""
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
