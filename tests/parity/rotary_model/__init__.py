"""Models with rotary positions in every block, registered by custom_import = "rotary_model"."""

from titanlite.models import ModelSpec, register

for name, model in (("rotary", "RotaryModel"), ("rotary_sp", "SequenceParallelRotaryModel")):
    register(
        ModelSpec(
            name=name,
            config="rotary_model.config:RotaryConfig",
            build=f"rotary_model.model:{model}",
            plan="rotary_model.plan:PLANS",
        )
    )
