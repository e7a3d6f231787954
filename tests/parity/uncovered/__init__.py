"""Models with tensors that a plan does not name, registered by custom_import = "uncovered"."""

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

for name, build in (
    ("covered", "RotaryModel"),
    ("scaled", "Scaled"),
    ("scaled_sp", "ScaledSP"),
    ("undeclared_sp", "UndeclaredSP"),
    ("uneven", "Uneven"),
    ("wrapped", "Wrapped"),
    ("declared_wrong", "DeclaredWrong"),
    ("mixture", "Mixture"),
    ("mixture_sp", "MixtureSP"),
    ("convolution_sp", "ConvolutionSP"),
    ("unused", "Unused"),
    ("statistics", "Statistics"),
    ("averaged", "Averaged"),
    ("counting", "Counting"),
    ("drifting", "Drifting"),
    ("many_heads", "ManyHeads"),
):
    MODELS.add(
        ModelSpec(
            name=name,
            config="rotary_model.config:RotaryConfig",
            build=f"uncovered.model:{build}",
            plan="uncovered.plan:PLANS",
        )
    )
