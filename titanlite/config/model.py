"""Find the model that [model] names, and resolve its sizes; torch-free."""

import dataclasses
import functools
import importlib
import os
import sys
import typing
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from titanlite.config.keys import Key, field_types, job_keys, model_keys, nearest_key
from titanlite.config.problems import explain
from titanlite.config.schema import JobConfig
from titanlite.config.toml import show_name
from titanlite.errors import ConfigError, one_of, quote, suggest, user_line
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS, registers_something

TORCHTITAN_MODELS = ("llama4", "deepseek_v3", "qwen3", "gpt_oss", "flux", "vlm")


def load_model_spec(config: JobConfig) -> ModelSpec:
    """The model that [model] names; imports experimental.custom_import first.

    Raises ConfigError if the import fails or there is no such model.
    """
    module, name = config.experimental.custom_import, config.model.name
    if module:
        import_module(module)
        # The module may serve another purpose if the model is registered elsewhere.
        if not registers_something(module) and (name not in MODELS or MODELS.is_built_in(name)):
            raise ConfigError(
                f"experimental.custom_import: {quote(module)} registers no model and no data set; "
                "give a module that does (titanlite.register_model(...)), or remove this key"
            )
    if name not in MODELS:
        wrong = f"there is no model {quote(name)}"
        if name in TORCHTITAN_MODELS:
            wrong = f"{quote(name)} is a TorchTitan model that titanlite does not have"
        raise ConfigError(
            f"model.name: {wrong}; {_suggest(name, MODELS)}, "
            "or set experimental.custom_import to a module that registers your model"
        )
    spec: ModelSpec = MODELS[name]
    return spec


def load_config_class(spec: ModelSpec) -> Any:
    """The configuration class of a model; raises ConfigError if it cannot be loaded or used."""
    try:
        flavors = spec.load_flavors()
        config_class = spec.load_config_class()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"model.name: loading {_shown(spec.config)} or its flavors failed with {_why(error)}; "
            f"correct the registration of {quote(spec.name)}"
        ) from error
    wrong = [name for name, made in flavors.items() if not isinstance(made, config_class)]
    if not dataclasses.is_dataclass(config_class) or wrong or not flavors:
        what = "is not a dataclass"
        if dataclasses.is_dataclass(config_class):
            what = f"is not the class of flavor {quote(wrong[0])}" if wrong else "has no flavor"
        raise ConfigError(
            f"model.name: {_shown(spec.config)}, the configuration of {quote(spec.name)}, {what}; "
            "see titanlite/models/__init__.py for what it must be"
        )
    return config_class


def _shown(part: Any) -> str:
    return quote(part) if isinstance(part, str) else getattr(part, "__qualname__", repr(part))


def flavor_of(config: JobConfig, flavors: Collection[str]) -> str:
    """The flavor that [model] names, or else the model's first."""
    return config.model.flavor if config.model.flavor is not None else next(iter(flavors))


def size_problems(model: Any, dims: ParallelDims, seq_len: int) -> list[tuple[str, str]]:
    """Sizes of a model that do not fit together, or to the mesh: (key, message); see models."""
    return model.problems(dims, seq_len) if hasattr(model, "problems") else []


def num_experts(config: JobConfig, model: Any) -> int:
    """The experts of a block of the job's model of these sizes; 0 if it has none.

    If the model's configuration does not tell and the model is a user's, it is built on "meta" and
    looked at.
    """
    known = getattr(model, "num_experts", None)
    if known is not None or MODELS.is_built_in(config.model.name):
        return known or 0
    from titanlite.models.build import count_experts

    return count_experts(load_model_spec(config), model)


def make_model_config(config: JobConfig) -> Any:
    """The sizes of the job's model: its flavor with the overrides of [model].

    Raises ConfigError for an unknown model, flavor or key, and for a value of the wrong type.
    """
    found = resolve_model(config)
    if found.problems:
        raise ConfigError(*found.problems)
    return found.sizes


@dataclass
class ResolvedModel:
    """The result of resolving [model]: the model's sizes, and the problems."""

    sizes: Any = None
    """None if a problem leaves them unknown."""
    problems: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    """Keys of other sections that an unknown name may have meant."""


def resolve_model(config: JobConfig, *, flavor_is_known: bool = True) -> ResolvedModel:
    """The sizes of the job's model, if they can be resolved, and all problems found."""
    found = ResolvedModel()
    try:
        spec = load_model_spec(config)
        config_class = load_config_class(spec)
    except ConfigError as error:
        found.problems += error.problems
        return found
    flavors = spec.load_flavors()
    flavor = flavor_of(config, flavors)
    values = _read_overrides(config.model.overrides, config_class, spec.name, found)
    if flavor_is_known and flavor not in flavors:
        found.problems.append(
            f"model.flavor: {spec.name} has no flavor {quote(flavor)}; {_suggest(flavor, flavors)}"
        )
        flavor_is_known = False
    if values is None or not flavor_is_known:
        return found
    try:
        found.sizes = dataclasses.replace(flavors[flavor], **values)
    except ValueError as error:
        found.problems.append(f"model: {_why(error)}; change the sizes in [model]")
    return found


def _read_overrides(
    overrides: dict[str, Any], config_class: Any, model: str, found: ResolvedModel
) -> dict[str, Any] | None:
    """The overrides with the types of `config_class`; None, and problems in `found`, if invalid."""
    keys = model_keys(config_class)
    hints = field_types(config_class)
    values: dict[str, Any] = {}
    is_sure = True
    for name, value in overrides.items():
        key = keys.get(f"model.{name}")
        if key is None:
            meant = nearest_key(f"model.{name}", job_keys() | keys)
            found.problems.append(_unknown(f"model.{name}", meant, keys, model))
            if meant in keys:
                is_sure = False
            elif meant:
                found.doubtful.add(meant)
            continue
        adapter = _adapter(config_class, name)
        # TOML has only lists, and strict pydantic refuses a list for a tuple.
        is_tuple = typing.get_origin(hints[name]) is tuple and isinstance(value, list)
        try:
            values[name] = adapter.validate_python(tuple(value) if is_tuple else value)
        except ValidationError as error:
            first = error.errors()[0]
            found.problems.append(explain(key, first, value, depth=len(first["loc"])))
            is_sure = False
    return values if is_sure else None


@functools.cache
def _adapter(config_class: Any, name: str) -> TypeAdapter[Any]:
    """For one field. Making it takes a hundred times as long as reading a value with it."""
    hint = field_types(config_class)[name]
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def _unknown(name: str, meant: str | None, keys: dict[str, Key], model: str) -> str:
    name = show_name(name)
    if meant:
        return f"{name}: there is no such key; did you mean {meant}?"
    fields = ", ".join(key.leaf for key in keys.values())
    return f"{name}: there is no such key; the keys of {model} are {fields}"


def _suggest(name: str, known: Collection[str]) -> str:
    return suggest(name, known, f"give {one_of(map(quote, known))}", quote)


def import_module(name: str) -> None:
    """Import experimental.custom_import; raises ConfigError if that fails."""
    here = os.getcwd()
    if here not in sys.path:
        # At the end, so that a file here does not hide an installed package.
        sys.path.append(here)
    try:
        importlib.import_module(name)
    except Exception as error:  # a user's module may raise anything
        line = user_line(error)
        cure = (
            f"correct {line}" if line else f"give a module that can be imported from {quote(here)}"
        )
        raise ConfigError(
            f"experimental.custom_import: importing {quote(name)} failed with {_why(error)}; {cure}"
        ) from error


def _why(error: Exception) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())})"
