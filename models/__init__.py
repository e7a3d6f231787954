"""The registry of models. It holds only names, so that a job can be checked without torch.

A model has three parts, named here as "module:attribute" and imported when first used:

config  a frozen dataclass whose typed fields are keys of [model], besides `name` and `flavor`.
        `Annotated[..., pydantic.Field(gt=0, description=...)]` gives a field bounds and its text
        in --help. The module is torch-free and has `FLAVORS`, a dict from flavor name to an
        instance. Required fields, properties or methods:
            vocab_size
            num_parameters               of the whole model
            flops_per_token(seq_len)     forward and backward, in sequences of that length
            problems(dims, seq_len)      list of (key, message), such as
                                         ("model.num_heads", "4 does not divide dim 90; ...")
        Optional:
            seq_len                      for a model of fixed sequence length; any other model
                                         gets training.seq_len
            module_names                 the modules in the order of the forward pass, between
                                         which a pipeline can split the model
            image_height, image_width, image_channels    for a model of images of one size
model   an nn.Module class, constructed as `model(config)`. `forward(tokens, positions)` returns
        next-token logits [B, T, V] for tokens [B, T] at `positions` [T] or [B, T] in their
        sequences; the tokens may be any part of the sequences. `positions` and the other fields of
        the data set are passed by name to every pipeline stage whose forward takes them. Context
        parallelism requires `positions`. Optional methods:
            init_parameter(name, parameter, generator)    fills a whole parameter in place
            init_buffers()               sets the buffers' values; required if there are buffers
            make_cache(seq_len)          the cache that `forward(tokens, cache=...)` fills while
                                         sampling; its `keep_first(num_sequences)` drops the other
                                         sequences. Without it, sampling recomputes all earlier
                                         tokens for each new token
        Two names may be one parameter (tied weights): `self.output.weight = self.tok_emb.weight`
plan    how the model is sharded: see models/image_transformer/plan.py.

A model outside this folder registers itself: `[experimental] custom_import = "package.module"`
imports a module that calls `register(ModelSpec(...))`.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any


def load(path: str) -> Any:
    """Import "module:attribute" and return the attribute."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class ModelSpec:
    """The parts of a model, each as "module:attribute"; imported only by the load methods."""

    name: str
    config: str
    model: str
    plan: str

    def load_config_class(self) -> Any:
        """The model's configuration dataclass; imports no torch for the models of this folder."""
        return load(self.config)

    def load_flavors(self) -> dict[str, Any]:
        """Flavor name -> configuration: `FLAVORS` of the module that holds the config class."""
        return load(self.config.partition(":")[0] + ":FLAVORS")

    def load_model_class(self) -> Any:
        """The nn.Module class; imports torch."""
        return load(self.model)

    def load_plans(self) -> Any:
        """The parallelize plans; imports torch."""
        return load(self.plan)


MODELS: dict[str, ModelSpec] = {}
"""Every registered model by name."""

REGISTERED_BY: dict[str, set[str]] = {}
"""Name of a model -> the modules whose import called `register`."""


def register(spec: ModelSpec) -> None:
    """Register a model as `spec.name`; raises ValueError if another model has that name."""
    if MODELS.setdefault(spec.name, spec) != spec:
        raise ValueError(f"a model named {spec.name!r} is registered already")
    REGISTERED_BY.setdefault(spec.name, set()).update(registering_modules())


def models_of(module: str) -> list[str]:
    """The names of the models that `module`, or a module of that package, registered."""
    return [
        name
        for name, modules in REGISTERED_BY.items()
        if name in MODELS and any(f"{by}.".startswith(f"{module}.") for by in modules)
    ]


def is_built_in(name: str) -> bool:
    """Whether only this package registered the model `name`."""
    return REGISTERED_BY.get(name) == {__name__}


def registering_modules() -> set[str]:
    """The module that calls this function's caller, and the modules whose import led there."""
    frame: FrameType | None = sys._getframe(2)
    assert frame is not None
    names = {frame.f_globals.get("__name__", "")}
    if names == {__name__}:
        return names  # importing this package registers nothing for the importer
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            names.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return names


def find_model(name: str) -> ModelSpec:
    """The model registered as `name`; raises KeyError if there is none."""
    return MODELS[name]


register(
    ModelSpec(
        name="image_transformer",
        config="titanlite.models.image_transformer.config:ImageTransformerConfig",
        model="titanlite.models.image_transformer.model:ImageTransformer",
        plan="titanlite.models.image_transformer.plan:PLANS",
    )
)
