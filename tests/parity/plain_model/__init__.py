"""A user's own model, registered by experimental.custom_import = "plain_model"."""

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

MODELS.add(
    ModelSpec(
        name="plain",
        config="plain_model.config:PlainConfig",
        build="plain_model.model:PlainModel",
        plan="plain_model.plan:PLANS",
    )
)
