"""Models that are right or wrong in a way of their own, by flavor; for the tests of verify."""

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

MODELS.add(
    ModelSpec(
        name="odd",
        config="odd_model.config:OddConfig",
        build="odd_model.model:OddModel",
        plan="odd_model.model:PLANS",
    )
)
