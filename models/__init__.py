"""The models by name; spec.py says what a model is made of."""

from __future__ import annotations

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

MODELS.home = __name__

MODELS.add(
    ModelSpec(
        name="image_transformer",
        config="titanlite.models.image_transformer.config:ImageTransformerConfig",
        build="titanlite.models.image_transformer.model:ImageTransformer",
        plan="titanlite.models.image_transformer.plan:PLANS",
    )
)
MODELS.add(
    ModelSpec(
        name="llama3",
        config="titanlite.models.llama3.config:Llama3Config",
        build="titanlite.models.llama3.model:Llama3",
        plan="titanlite.models.llama3.plan:PLANS",
        hf="titanlite.models.llama3.hf:FORMAT",
    )
)
MODELS.add(
    ModelSpec(
        name="gpt2",
        config="titanlite.models.gpt2.config:GPT2Config",
        build="titanlite.models.gpt2.model:GPT2",
        plan="titanlite.models.gpt2.plan:PLANS",
        hf="titanlite.models.gpt2.hf:FORMAT",
    )
)
MODELS.add(
    ModelSpec(
        name="hf",
        config="titanlite.models.hf.config:HFConfig",
        build="titanlite.models.hf.model:build",
        plan="titanlite.models.hf.plan:plan",
        inputs="titanlite.models.hf.model:inputs",
        output="titanlite.models.hf.model:output",
        hf="titanlite.models.hf.format:FORMAT",
    )
)
