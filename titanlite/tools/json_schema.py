"""The schema as JSON Schema, for editors: titanlite schema > titanlite.schema.json"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from titanlite.config.keys import KINDS, Key, job_keys, job_sections, model_keys
from titanlite.registry import MODELS
from titanlite.tools.options import CommandParser

LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
OTHERS = {"list": "array", "value": "object"}


def main(arguments: Sequence[str]) -> int:
    """Print it; returns the exit status."""
    about = "Print the JSON Schema of a job; docs/configuration.md says how editors use it."
    CommandParser(prog="titanlite schema", description=about).parse_args(arguments)
    print(json.dumps(json_schema(), indent=1))
    return 0


def json_schema() -> dict[str, Any]:
    """Every section and key. A model's own keys are described, but not checked."""
    tables: dict[str, dict[str, Any]] = {"": {"$schema": "http://json-schema.org/draft-07/schema#"}}
    tables |= {name: {"description": kind.__doc__} for name, kind in job_sections().items()}
    for name, table in tables.items():
        table |= {"type": "object", "properties": {}, "additionalProperties": name == "model"}
        if name:
            parent, _, leaf = name.rpartition(".")
            tables[parent]["properties"][leaf] = table
    for key in job_keys().values():
        text = f"{key.text} ({key.type_name()})" if key.is_live else f"not in titanlite: {key.text}"
        made = {"description": text, "default": key.default, **_check(key)}
        tables[key.section]["properties"][key.leaf] = made
    for spec in MODELS.values():
        for key in model_keys(spec.load_config_class()).values():
            tables["model"]["properties"].setdefault(key.leaf, {"description": key.text})
    return tables[""]


def _check(key: Key) -> dict[str, Any]:
    if key.not_yet or key.choices:
        return {"enum": [*key.choices] or [key.default]}
    kind = KINDS.get(key.type, "value")
    limits = {LIMITS[n]: getattr(m, n) for n in LIMITS for m in key.limits if hasattr(m, n)}
    items = {"items": _check(key.item)} if key.item else {}
    return {"type": OTHERS.get(kind, kind), **limits, **items}
