"""The JSON Schema of a job accepts the shipped configs and refuses what the schema refuses."""

import json
from collections.abc import Iterator
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

import pytest

from titanlite.cli import main
from titanlite.config.toml import parse_toml

ROOT = Path(__file__).parents[3]
KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int}
KINDS |= {"number": (int, float), "boolean": bool}
LIMITS = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le, "exclusiveMaximum": lt}
WRONG = {
    "training.stpes = 3": "training.stpes",
    "training.steps = 0": "training.steps",
    "validation.enable = 1": "validation.enable",
    "optimizer.beta1 = 1.5": "optimizer.beta1",
    "compile.components = ['layer']": "compile.components",
    "metrics.save_for_all_ranks = true": "metrics.save_for_all_ranks",
}


def problems(value: Any, schema: dict[str, Any], name: str = "") -> Iterator[str]:
    """The names of the keys that `schema` refuses; it knows the words that the schema uses."""
    kind = schema.get("type", "value")
    is_kind = isinstance(value, KINDS.get(kind, object))
    is_kind &= kind in ("boolean", "value") or not isinstance(value, bool)
    if not is_kind or value not in schema.get("enum", [value]):
        yield name
    elif kind == "object":
        for leaf, each in value.items():
            if leaf in schema.get("properties", {}):
                yield from problems(each, schema["properties"][leaf], f"{name}.{leaf}".lstrip("."))
            elif not schema.get("additionalProperties", True):
                yield f"{name}.{leaf}".lstrip(".")
    elif kind == "array":
        yield from (wrong for each in value for wrong in problems(each, schema["items"], name))
    elif not all(holds(value, schema[limit]) for limit, holds in LIMITS.items() if limit in schema):
        yield name


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["schema"]) == 0
    return json.loads(capsys.readouterr().out)


def test_shipped_configs_are_accepted(schema: Any) -> None:
    values = {file: parse_toml(file.read_text()) for file in (ROOT / "configs").rglob("*.toml")}
    # Beside published jobs lie their rows and hardware.
    jobs = {file: one for file, one in values.items() if not {"base", "source"} & one.keys()}
    assert len(jobs) > 30
    for file, one in jobs.items():
        assert not list(problems(one, schema)), file


def test_what_is_wrong_is_refused(schema: Any) -> None:
    for text, name in WRONG.items():
        assert list(problems(parse_toml(text), schema)) == [name]
