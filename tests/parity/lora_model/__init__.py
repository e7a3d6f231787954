"""A frozen model with trained adapters (LoRA), registered by custom_import = "lora_model"."""

import titanlite

titanlite.register_model(
    "lora", "lora_model.model:Model", "lora_model.sizes:Sizes", plan="lora_model.model:PLAN"
)
