"""A model and a data set whose batches have more than tokens, and a loss of their own.

Registered by custom_import = "wide_model".
"""

from titanlite.data.spec import DatasetSpec
from titanlite.models.spec import ModelSpec
from titanlite.registry import DATASETS, MODELS

MODELS.add(
    ModelSpec(
        name="wide",
        config="wide_model.sizes:WideConfig",
        build="wide_model.model:WideModel",
        plan="wide_model.plan:PLANS",
    )
)
DATASETS.add(
    DatasetSpec(
        "weighted",
        "random tokens, each with a weight and a number, each sequence with a label",
        build="wide_model.data:build",
        fields={"targets": 0, "weights": 0, "levels": 0, "label": None},
        loss="wide_model.data:WEIGHTED",
    )
)
