"""The models by name; names only, so that a mistake in a job is found before torch is imported.

A model needs two things, and may have more. Each is given as "module:attribute", which is imported
when it is first needed, or as an object. A registering module that imports no torch keeps a job's
checks fast; one that imports it works too.

build   a callable that returns the plain nn.Module for a configuration, such as its class. The
        first argument of its forward is the first field of a batch; it receives other fields by
        name: `forward(tokens, positions)` gets the token indices [B, T] and their positions in the
        sequence, [T] or [B, T]. Every pipeline stage that has an argument of that name gets it.
config  a dataclass, whose fields are keys of [model] beside `name` and `flavor`. They are typed,
        and with `Annotated[..., pydantic.Field(gt=0, description=...)]` bounded and explained in
        --help. It may have
            vocab_size              checked against the data set's
            seq_len                 the only length that the model takes; any other model gets
                                    training.seq_len
            problems(dims, seq_len) sizes that do not fit together or to the mesh: a list of
                                    (key, message) pairs such as
                                    ("model.num_heads", "4 does not divide dim 90; give 5")
            num_parameters, flops_per_token(seq_len)    counted on the "meta" device if missing
            module_names            the modules in the order of the forward pass, between which a
                                    pipeline can split; by default the plan's embeddings, blocks
                                    and head
            image_height, image_width, image_channels   for a model of images of one size
flavors configurations by name; by default FLAVORS of the module of `config`, or a single "default"
        that has all defaults. The first one is the default of model.flavor.
plan    how the model is sharded: a ParallelPlan, a dict from model class to plan, or a function
        from the plain model to its plan. By default the one in plan.py beside the model.
init    a function that sets the initial values of the whole model on the CPU. See below.
inputs  the arguments of forward besides the first, if their names are not those of fields: a dict
        from argument to field, or a function from the batch to keyword arguments.
output  a function from forward's result to the tensor that the loss gets, such as
        `lambda result: result.logits`.
hf      how its weights and sizes are stored in a Hugging Face folder: an HFFormat
        (titanlite/hf_format.py).

Two names may be one parameter (tied weights): `self.output.weight = self.tok_emb.weight`.

Initial values. A model class may define `init_parameter(name, parameter, generator)`, which fills
one whole parameter in place, and `init_buffers()`. Then no rank holds more than its shards plus one
whole parameter. Without it, the whole model is built on the CPU of each machine, `init`, or else
the model's own `init_weights()`, is called, and each rank copies its shards.

A class may also define `make_cache(seq_len)`, which `forward(tokens, cache=...)` fills while
sampling, with `keep_first(num_sequences)`; without it each token reads all previous ones again.
A job that keeps documents apart also passes `positions` and `documents` [B, T] of the new tokens.

A model outside this package registers itself: `[experimental] custom_import = "package.module"`
imports a module that calls `titanlite.register_model(...)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any


def load(path: Any) -> Any:
    """The object that "module:attribute" names; any other object is returned as it is."""
    if not isinstance(path, str):
        return path
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


@dataclass(frozen=True)
class ModelSpec:
    """The parts of a model, each as "module:attribute" or as an object; see this module."""

    name: str
    config: str | type
    build: str | Callable[[Any], Any]
    plan: str | Any = None
    flavors: str | Mapping[str, Any] | None = None
    init: str | Callable[[Any], None] | None = None
    inputs: str | Mapping[str, str] | Callable[[Any], Mapping[str, Any]] | None = None
    output: str | Callable[[Any], Any] | None = None
    hf: Any = None

    def load_config_class(self) -> Any:
        """The model's configuration dataclass."""
        return load(self.config)

    def load_flavors(self) -> dict[str, Any]:
        """Flavor name -> configuration."""
        if self.flavors is not None:
            return dict(load(self.flavors))
        config_class = self.load_config_class()
        module = config_class.__module__
        if isinstance(self.config, str):
            module = self.config.partition(":")[0]
        found = getattr(sys.modules.get(module), "FLAVORS", None)
        if found is not None:
            return dict(found)
        if any(
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            for field in dataclasses.fields(config_class)
        ):
            raise AttributeError(
                f"{config_class.__name__} has fields without default and no FLAVORS"
            )
        return {"default": config_class()}

    def load_build(self) -> Any:
        """The callable that builds the model; imports torch."""
        return load(self.build)


MODELS: dict[str, ModelSpec] = {}
"""Every registered model by name."""

REGISTERED_BY: dict[str, set[str]] = {}
"""Model name -> the modules whose import registered it."""


def register(spec: ModelSpec) -> None:
    """Register a model as `spec.name`. Raises ValueError if a different one has that name."""
    enter(spec, MODELS, REGISTERED_BY, "model")


def enter(spec: Any, table: dict[str, Any], by: dict[str, set[str]], kind: str) -> None:
    """Add `spec` to a table of specs by name, and the modules that register it to `by`.

    Raises ValueError if a different spec has that name, unless a script or a notebook has
    registered both: a cell may run again.
    """
    registrar, *others = registering_modules()
    if registrar == "__main__" and by.get(spec.name) == {registrar}:
        table[spec.name] = spec
    elif table.setdefault(spec.name, spec) != spec:
        raise ValueError(f"a different {kind} named {spec.name!r} is already registered")
    by.setdefault(spec.name, set()).update((registrar, *others))


def is_built_in(name: str) -> bool:
    """Whether only this package registered the model `name`."""
    return REGISTERED_BY.get(name) == {__name__}


_REGISTERING = (__name__, "titanlite.data.catalog", "titanlite.registry")


def registering_modules() -> list[str]:
    """The module that registers something now, then the modules whose import led there."""
    frame: FrameType | None = sys._getframe(1)
    while (
        frame is not None
        and frame.f_globals.get("__name__") in _REGISTERING
        and frame.f_code.co_name != "<module>"
    ):
        frame = frame.f_back
    assert frame is not None
    names = [frame.f_globals.get("__name__", "")]
    if names == [__name__]:
        return names  # importing this package registers nothing for the importer
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return names


def find_model(name: str) -> ModelSpec:
    """The model registered as `name`; raises KeyError if there is none."""
    return MODELS[name]


register(
    ModelSpec(
        name="image_transformer",
        config="titanlite.models.image_transformer.config:ImageTransformerConfig",
        build="titanlite.models.image_transformer.model:ImageTransformer",
        plan="titanlite.models.image_transformer.plan:PLANS",
    )
)
register(
    ModelSpec(
        name="llama3",
        config="titanlite.models.llama3.config:Llama3Config",
        build="titanlite.models.llama3.model:Llama3",
        plan="titanlite.models.llama3.plan:PLANS",
        hf="titanlite.models.llama3.hf:FORMAT",
    )
)
register(
    ModelSpec(
        name="gpt2",
        config="titanlite.models.gpt2.config:GPT2Config",
        build="titanlite.models.gpt2.model:GPT2",
        plan="titanlite.models.gpt2.plan:PLANS",
        hf="titanlite.models.gpt2.hf:FORMAT",
    )
)
register(
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
