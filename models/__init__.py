"""The models by name; spec.py says what a model is made of."""

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

if __name__ != "titanlite.models":
    raise ImportError(
        f"{__name__}: import titanlite.models instead; by this name the folder would be a second "
        "copy, whose classes no job uses"
    )
MODELS.home = __name__

for name, config, build, has_folders in (
    ("image_transformer", "ImageTransformerConfig", "ImageTransformer", False),
    ("llama3", "Llama3Config", "Llama3", True),
    ("gpt2", "GPT2Config", "GPT2", True),
):
    MODELS.add(
        ModelSpec(
            name,
            config=f"titanlite.models.{name}.config:{config}",
            build=f"titanlite.models.{name}.model:{build}",
            plan=f"titanlite.models.{name}.plan:PLANS",
            hf=f"titanlite.models.{name}.hf:FORMAT" if has_folders else None,
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
