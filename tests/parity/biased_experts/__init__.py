"""A Llama with experts whose shared experts have an output bias, as those of GPT-OSS have."""

from titanlite import register_model

register_model(
    "biased_experts",
    "biased_experts.model:build",
    "titanlite.models.llama3.config:Llama3Config",
    plan="titanlite.models.llama3.plan:PLANS",
)
