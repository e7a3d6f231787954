"""Float8: linear layers that multiply in float8, and weights gathered in float8; torch-free."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from titanlite.errors import quote
from titanlite.fields import Name, Section, Values, extra_key, key, reads
from titanlite.parallelize.async_tensor_parallel.spec import ASYNC_TP
from titanlite.parallelize.feature import Feature, Variation
from titanlite.parallelize.fsdp.spec import SHARDED

if TYPE_CHECKING:
    from titanlite.config.draft import Draft

SECTION = "quantize.linear.float8"


class Float8Section(Section):
    """Linear layers in float8, if model.converters names this section"""

    enable_fsdp_float8_all_gather: bool = key(
        False, "tensorwise: FSDP all-gathers weights in float8"
    )
    precompute_float8_dynamic_scale_for_fsdp: bool = key(
        False, "compute all scales of these weights at once, after each optimizer step"
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = key(
        None, "scale per tensor (if not set) or row; gw_hp: weight gradients in high precision"
    )
    filter_fqns: Values[Name] = key(
        (), "parts of names of layers not to convert; auto_filter_small_kn: small layers"
    )
    local_scales: bool = extra_key(
        False, "scale by each rank's own tokens, as torchao does; the numbers depend on the plan"
    )
    emulate: bool = key(False, "emulate float8, even if the hardware supports it")

    @property
    def recipe(self) -> Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]:
        """The recipe's name, with its default resolved."""
        return self.recipe_name or "tensorwise"


@reads("model.converters", SECTION, ASYNC_TP)
def _float8(job: "Draft") -> Iterator[str]:
    """Float8 needs torchao and does not work with async TP; FSDP gathers in float8 only with the
    recipe "tensorwise"."""
    section = job.config.section(Float8Section)
    if SECTION not in job.config.model.converters:
        return
    if importlib.util.find_spec("torchao") is None:
        yield (
            "model.converters: float8 needs the package torchao, which is not installed; "
            'pip install "titanlite[float8]"'
        )
    if job.config.parallelism.enable_async_tensor_parallel:
        yield (
            f"{ASYNC_TP}: it does not support float8 scales; set it to false, or remove "
            f'"{SECTION}" from model.converters'
        )
    is_gathered = section.enable_fsdp_float8_all_gather
    if is_gathered and section.recipe != "tensorwise":
        yield (
            f"{SECTION}.enable_fsdp_float8_all_gather: {quote(section.recipe)} scales rows and "
            "columns separately, but a gathered weight has one scale; set it to false, or set "
            'recipe_name to "tensorwise"'
        )
    if section.precompute_float8_dynamic_scale_for_fsdp and not is_gathered:
        yield (
            f"{SECTION}.precompute_float8_dynamic_scale_for_fsdp: has no effect unless weights are "
            "gathered in float8; set enable_fsdp_float8_all_gather = true, or remove this key"
        )
    if section.recipe == "rowwise_with_gw_hp" and "auto_filter_small_kn" in section.filter_fqns:
        yield (
            f'{SECTION}.filter_fqns: torchao does not support "auto_filter_small_kn" with '
            '"rowwise_with_gw_hp"; remove it, or set recipe_name to "rowwise"'
        )


def _settings(**keys: Any) -> dict[str, Any]:
    """The settings that convert to float8 with these keys of the section."""
    section = {f"{SECTION}.{name}": value for name, value in {"emulate": True, **keys}.items()}
    return {"model.converters": [SECTION], **section}


GATHERED = {"enable_fsdp_float8_all_gather": True}

FLOAT8 = Feature(
    "float8",
    "float8",
    is_on=lambda config: SECTION in config.model.converters,
    sections={SECTION: Float8Section},
    converter=SECTION,
    checks=(_float8,),
    variations=(
        Variation(
            "float8",
            {
                "off": {},
                "tensorwise": _settings(),
                "gathered": _settings(**GATHERED),
                "precomputed": _settings(**GATHERED, precompute_float8_dynamic_scale_for_fsdp=True),
                "rowwise": _settings(recipe_name="rowwise"),
                "rowwise_with_gw_hp": _settings(recipe_name="rowwise_with_gw_hp"),
            },
            value_needs={"gathered": SHARDED, "precomputed": SHARDED},
            # So that the output layer, which has one of PyTorch's styles, is converted too.
            sizes={"vocab_size": 32},
        ),
    ),
    off={"model.converters": []},
    changes_numbers=True,
    # A scale covers all sequences of a microbatch.
    depends_on_microbatch=True,
    # A value at the edge between two float8 values may be cast to either, which changes a gradient
    # by up to a percent.
    loss_tolerance=1e-4,
    checks_model=True,
)
