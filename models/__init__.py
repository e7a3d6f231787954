"""The models by name; names only, so that a mistake in a job is found before torch is imported.

A model is three things, named here as "module:attribute" and imported when first asked for:

config  a frozen dataclass whose fields are the keys that [model] takes beside `name` and
        `flavor`, typed (and, with `Annotated[..., pydantic.Field(gt=0, description=...)]`,
        bounded and explained in --help). Its module is torch-free and has `FLAVORS`, a dict from
        flavor name to an instance. It must have
            vocab_size                   a field or a property, as the others are
            num_parameters               of the whole model
            flops_per_token(seq_len)     forward and backward, in sequences of that length
            problems(dims, seq_len)      list of (key, message), such as
                                         ("model.num_heads", "4 does not divide dim 90; ...")
        and it may have
            seq_len                      the one length that the model takes, where it has one;
                                         any other model gets training.seq_len
            module_names                 its modules in the order of the forward pass, which a
                                         pipeline can be cut at
            image_height, image_width, image_channels    for a model of images of one size
model   an nn.Module class, constructed as `model(config)`. `forward(tokens, positions)` gives the
        logits [B, T, V] for what comes after each of the tokens [B, T], which stand at the places
        `positions` of their sequences, [T] or [B, T]; they may be any part of them. `positions`,
        and whatever else the data set's samples have, is passed by name to every stage of a
        pipeline that takes it; context parallelism needs the positions. It may also have
            init_parameter(name, parameter, generator)    fills a whole parameter in place
            init_buffers()               sets the buffers' values; needed where there are any
            make_cache(seq_len)          what `forward(tokens, cache=...)` fills while sampling,
                                         with a `keep_first(num_sequences)` that drops the others;
                                         without it each token reads all before it once more
plan    how the model is split: see models/image_transformer/plan.py.

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
    """What "module:attribute" names, imported."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class ModelSpec:
    """Where a model's parts are, each as "module:attribute"; nothing is imported until loaded."""

    name: str
    config: str
    model: str
    plan: str

    def load_config_class(self) -> Any:
        """The model's configuration dataclass; torch-free for the models of this folder."""
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
"""Name of a model -> the modules that registered it: those whose import called `register`."""


def register(spec: ModelSpec) -> None:
    """Makes a model known under `spec.name`; raises ValueError if another one has that name."""
    if MODELS.setdefault(spec.name, spec) != spec:
        raise ValueError(f"a model named {spec.name!r} is registered already")
    REGISTERED_BY.setdefault(spec.name, set()).update(registering_modules())


def models_of(module: str) -> list[str]:
    """The names of the models that `module`, or a module of that package, has registered."""
    return [
        name
        for name, modules in REGISTERED_BY.items()
        if name in MODELS and any(f"{by}.".startswith(f"{module}.") for by in modules)
    ]


def is_built_in(name: str) -> bool:
    """Whether only this package has registered the model `name`."""
    return REGISTERED_BY.get(name) == {__name__}


def registering_modules() -> set[str]:
    """The module that calls the function that calls this, and those whose import led there."""
    frame: FrameType | None = sys._getframe(2)
    assert frame is not None
    names = {frame.f_globals.get("__name__", "")}
    if names == {__name__}:
        return names  # whoever imports this package registers nothing by that
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            names.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return names


def find_model(name: str) -> ModelSpec:
    """The model registered under `name`; raises KeyError where there is none."""
    return MODELS[name]


register(
    ModelSpec(
        name="image_transformer",
        config="titanlite.models.image_transformer.config:ImageTransformerConfig",
        model="titanlite.models.image_transformer.model:ImageTransformer",
        plan="titanlite.models.image_transformer.plan:PLANS",
    )
)
