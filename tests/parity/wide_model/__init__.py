"""A model and a data set whose batches have more than tokens, and a loss of their own.

Registered by custom_import = "wide_model".
"""

from titanlite import register_dataset, register_model

register_model(
    "wide",
    "wide_model.model:WideModel",
    "wide_model.sizes:WideConfig",
    plan="wide_model.model:PLANS",
)
register_dataset(
    "weighted",
    "wide_model.data:build",
    description="random tokens, each with a weight and a number, each sequence with a label",
    fields={"targets": 0, "weights": 0, "levels": 0, "label": None},
    loss="wide_model.data:WEIGHTED",
)
