"""Models whose output layer is their embedding table, registered by custom_import."""

from titanlite import register_model

for name, model in (
    ("tied", "TiedModel"),
    ("tied_sp", "SequenceParallelTiedModel"),
    ("tied_apart", "TiedModelPlacedApart"),
):
    register_model(
        name,
        f"tied_model.model:{model}",
        "rotary_model.config:RotaryConfig",
        plan="tied_model.model:PLANS",
    )
