"""Models with tensors that a plan does not name, registered by custom_import = "uncovered"."""

from titanlite import register_model

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
    register_model(
        name,
        f"uncovered.model:{build}",
        "rotary_model.config:RotaryConfig",
        plan="uncovered.plan:PLANS",
    )
