"""A user's model whose plan has a mistake, chosen by model.fault; "" is right."""

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

MODELS.add(
    ModelSpec(
        name="faulty",
        config="faulty_model.config:FaultyConfig",
        build="faulty_model.model:FaultyModel",
        plan="faulty_model.plan:PLANS",
    )
)
