"""Models with rotary positions in every block, registered by custom_import = "rotary_model"."""

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

for name, model in (("rotary", "RotaryModel"), ("rotary_sp", "SequenceParallelRotaryModel")):
    MODELS.add(
        ModelSpec(
            name=name,
            config="rotary_model.config:RotaryConfig",
            build=f"rotary_model.model:{model}",
            plan="rotary_model.plan:PLANS",
        )
    )
