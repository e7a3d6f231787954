"""From a job's [model] section to the model it names and the sizes that model gets; torch-free."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
import typing
from collections.abc import Collection
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

import models
from models import ModelSpec
from titanlite.config.keys import (
    Key,
    field_types,
    job_keys,
    model_keys,
    nearest_key,
    one_of,
)
from titanlite.config.problems import explain
from titanlite.config.schema import JobConfig
from titanlite.config.toml import quote, show_name
from titanlite.errors import ConfigError


def load_model_spec(config: JobConfig) -> ModelSpec:
    """The model that [model] names, after importing [experimental] custom_import.

    Raises ConfigError if the import fails or there is no such model.
    """
    if config.experimental.custom_import:
        _import_module(config.experimental.custom_import)
    name = config.model.name
    if name not in models.MODELS:
        raise ConfigError(
            f"model.name: there is no model {quote(name)}; {_suggest(name, models.MODELS)}, "
            "or name a module that registers yours in experimental.custom_import"
        )
    return models.find_model(name)


REQUIRED = (
    "vocab_size",
    "image_height",
    "image_width",
    "image_channels",
    "num_tokens",
    "num_parameters",
    "flops_per_token",
    "problems",
)
"""What the rest of titanlite asks of any model's configuration."""


def load_config_class(spec: ModelSpec) -> Any:
    """The configuration class of a model; raises ConfigError if the spec does not lead to it."""
    try:
        flavors = spec.load_flavors()
        config_class = spec.load_config_class()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.name: loading {quote(spec.config)} or its FLAVORS failed with {_told(error)}; "
            f"correct the ModelSpec of {quote(spec.name)}"
        ) from error
    missing = [name for name in REQUIRED for made in flavors.values() if not hasattr(made, name)]
    if missing or not dataclasses.is_dataclass(config_class):
        what = f"lacks {', '.join(dict.fromkeys(missing))}" if missing else "is not a dataclass"
        raise ConfigError(
            f"model.name: {quote(spec.config)}, the configuration of {quote(spec.name)}, {what}; "
            "see models/__init__.py for what it must have"
        )
    return config_class


def make_model_config(config: JobConfig) -> Any:
    """The sizes of the job's model: its flavor with the overrides of [model].

    Raises ConfigError for an unknown model, flavor or key, and for a value of the wrong type.
    """
    spec = load_model_spec(config)
    config_class = load_config_class(spec)
    flavors = spec.load_flavors()
    problems: list[str] = []
    values = _read_overrides(config.model.overrides, config_class, spec.name, problems)
    flavor = config.model.flavor
    if flavor not in flavors:
        problems.append(
            f"model.flavor: {spec.name} has no flavor {quote(flavor)}; {_suggest(flavor, flavors)}"
        )
    if problems:
        raise ConfigError(*problems)
    try:
        return dataclasses.replace(flavors[flavor], **values)
    except ValueError as error:
        raise ConfigError(f"model: {_told(error)}; change the sizes in [model]") from error


def _read_overrides(
    overrides: dict[str, Any], config_class: Any, model: str, problems: list[str]
) -> dict[str, Any]:
    """The overrides as the types of `config_class` have them; what is wrong joins `problems`."""
    keys = model_keys(config_class)
    hints = field_types(config_class)
    values = {}
    for name, value in overrides.items():
        key = keys.get(f"model.{name}")
        if key is None:
            problems.append(_unknown(f"model.{name}", keys, model))
            continue
        adapter = TypeAdapter(hints[name], config=ConfigDict(strict=True, allow_inf_nan=False))
        # TOML has lists alone; strict pydantic would refuse one for a tuple.
        is_tuple = typing.get_origin(hints[name]) is tuple and isinstance(value, list)
        try:
            values[name] = adapter.validate_python(tuple(value) if is_tuple else value)
        except ValidationError as error:
            first = error.errors()[0]
            problems.append(explain(key, first, value, depth=len(first["loc"])))
    return values


def _unknown(name: str, keys: dict[str, Key], model: str) -> str:
    meant = nearest_key(name, job_keys() | keys)
    name = show_name(name)
    if meant:
        return f"{name}: there is no such key; did you mean {meant}?"
    fields = ", ".join(key.leaf for key in keys.values())
    return f"{name}: there is no such key; {model} has {fields}"


def _suggest(name: str, known: Collection[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {quote(match[0])}?" if match else f"give {one_of(map(quote, known))}"


def _import_module(name: str) -> None:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        importlib.import_module(name)
    except Exception as error:  # the module is the user's: anything can come out of it
        raise ConfigError(
            f"experimental.custom_import: importing {quote(name)} failed with {_told(error)}; "
            f"give a module that imports from {quote(here)}"
        ) from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())})"
