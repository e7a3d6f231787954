"""A Llama with experts whose shared experts have an output bias, as those of GPT-OSS have."""

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

MODELS.add(
    ModelSpec(
        name="biased_experts",
        config="titanlite.models.llama3.config:Llama3Config",
        build="biased_experts.model:build",
        plan="titanlite.models.llama3.plan:PLANS",
    )
)
