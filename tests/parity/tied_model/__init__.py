"""Models whose output layer is their embedding table, registered by custom_import."""

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

for name, model in (
    ("tied", "TiedModel"),
    ("tied_sp", "SequenceParallelTiedModel"),
    ("tied_apart", "TiedModelPlacedApart"),
):
    MODELS.add(
        ModelSpec(
            name=name,
            config="tied_model.config:TiedConfig",
            build=f"tied_model.model:{model}",
            plan="tied_model.plan:PLANS",
        )
    )
