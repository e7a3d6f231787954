"""What a model is made of, by name, so that a job is checked before torch is imported.

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
        (models/hf_format.py).

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

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.errors import ConfigError
from titanlite.registry import load


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

    def load_part(self, name: str) -> Any:
        """The part `name`, an object; raises ConfigError if it cannot be imported."""
        path = getattr(self, name)
        try:
            return load(path)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"model.name: loading {path} failed with {type(error).__name__} ({error}); correct "
                f"`{name}` in the registration of {self.name}"
            ) from error

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
