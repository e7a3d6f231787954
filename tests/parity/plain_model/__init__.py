"""A user's own model, registered by experimental.custom_import = "plain_model"."""

from titanlite import register_model

register_model(
    "plain",
    "plain_model.model:PlainModel",
    "plain_model.config:PlainConfig",
    plan="plain_model.plan:PLANS",
)
