"""LoRA: trained adapters of low rank on frozen linear layers; torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt, PositiveFloat

from titanlite.fields import Name, Section, Values, extra_key, reads
from titanlite.parallelize.async_tensor_parallel.spec import ASYNC_TP
from titanlite.parallelize.feature import Feature

if TYPE_CHECKING:
    from titanlite.config.draft import Draft


class LoRA(Section):
    """Fine-tuning by adapters of low rank; all other weights are frozen"""

    rank: NonNegativeInt = extra_key(0, "rank of the adapters; 0: none")
    alpha: PositiveFloat = extra_key(16.0, "updates are scaled by alpha / rank")
    dropout: float = extra_key(0.0, "dropout of the adapters' inputs", ge=0, lt=1)
    target_modules: Values[Name] = extra_key(
        (), "ends of names of linear layers to adapt, such as wq; if empty, all in the blocks"
    )
    save_merged: bool = extra_key(
        False,
        "checkpoint.last_save_in_hf: the whole model, instead of the adapters in peft's format",
    )
    init_lora_weights: bool = extra_key(
        True, "B starts at zero; false: random, as titanlite verify needs it"
    )

    @property
    def scale(self) -> float:
        """The factor of the updates; 0 without adapters."""
        return self.alpha / self.rank if self.rank else 0.0


@reads("lora", "model.converters", ASYNC_TP)
def _lora(job: "Draft") -> Iterator[str]:
    """Adapters need lora.rank, and do not work with float8 or async TP."""
    section = job.config.lora
    if not section.rank:
        if section != LoRA() and "rank" not in section.model_fields_set:
            yield (
                "lora.rank: is not set, so there are no adapters; give it, such as 8, or remove "
                "the section [lora]"
            )
        return
    if job.config.model.converters:
        yield "lora.rank: adapted layers do not compute in float8; remove model.converters"
    if job.config.parallelism.enable_async_tensor_parallel:
        yield f"{ASYNC_TP}: it does not overlap the products of adapters; set it to false"


LORA = Feature(
    "LoRA",
    "lora",
    is_on=lambda config: config.lora.rank > 0,
    sections={"lora": LoRA},
    checks=(_lora,),
    off={"lora.rank": 0},
    changes_numbers=True,
    checks_model=True,
)
