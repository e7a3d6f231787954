"""Models with rotary positions in every block, registered by custom_import = "rotary_model"."""

from titanlite import register_model

for name, model in (("rotary", "RotaryModel"), ("rotary_sp", "SequenceParallelRotaryModel")):
    register_model(
        name,
        f"rotary_model.model:{model}",
        "rotary_model.config:RotaryConfig",
        plan="rotary_model.plan:PLANS",
    )
