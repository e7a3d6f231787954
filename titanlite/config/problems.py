"""Turn pydantic's errors into messages `section.key: what is wrong; what to do`."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from titanlite.config.keys import KINDS, Key
from titanlite.config.toml import show
from titanlite.errors import one_of

LACKS = "asks for a TorchTitan feature that titanlite does not have"
REMOVE, REMOVE_OPTION = "remove this line", "remove this option"
REMOVE_SECTION = "remove this section"


def explain(key: Key, error: Mapping[str, Any], value: Any, depth: int = 0) -> str:
    """The message for `value` of `key`, which pydantic refused with `error`.

    `depth` is the number of lists around the refused item, `error["input"]`; 0 outside of lists.
    """
    if key.not_yet:
        legal = [key.default] if key.torchtitan is ... else [key.default, key.torchtitan]
        ways = [show(value) for value in legal if value not in (None, "")]
        advice = f"write {one_of(ways)}, or {REMOVE}" if ways else REMOVE
        if key.instead:
            advice = f"{key.instead} {REMOVE}"
        return f"{key.name}: {show(value)} {LACKS}; {advice}"
    for one in value if isinstance(value, list | tuple) else [value]:
        if one in key.lacking:
            return f"{key.name}: {show(one)} {LACKS}; give {key.describe()}"
    target, item = key, value
    if depth:
        item = error["input"]
        for _ in range(depth):
            target = target.item or target
    return f"{key.name}: {show(item)} {_wrong(target, item, error)}; {_advice(key, target, item)}"


def _wrong(key: Key, value: Any, error: Mapping[str, Any]) -> str:
    if key.type is object:
        return f"is invalid: {error['msg'][:1].lower()}{error['msg'][1:]}"
    kind, wanted = _kind(value), KINDS[key.type]
    if kind != wanted and not (kind == "integer" and key.type is float):
        return f"is {_a(kind)}, not {_a(wanted)}"
    if value == "":
        return "is empty"
    if error["type"] == "finite_number":
        return "is not a finite number"
    return "is not one of its values" if key.choices or key.type is str else "is out of range"


def _advice(key: Key, target: Key, value: Any) -> str:
    """How to write the value that was probably meant, or else the legal values."""
    meant: Any = None
    if isinstance(value, str) and target.type in (bool, int, float):
        with contextlib.suppress(ValueError):
            meant = json.loads(value.lower())
        if type(meant) is target.type or (type(meant) is int and target.type is float):
            return f"write {show(meant)}, without quotes"
    if isinstance(value, float) and target.type is int and value.is_integer():
        return f"write {int(value)}"
    if type(value) in (int, float) and target.type is str and not target.choices:
        return f"write {show(str(value))}, with quotes"
    if target.item is not None and type(value) is target.item.type:
        return f"write {show([value])}"
    return f"give {key.describe()}"


def _kind(value: Any) -> str:
    for kind, name in KINDS.items():
        if isinstance(value, kind):
            return name
    if value is None:
        return "unset value"
    if isinstance(value, (list, dict)):
        return "list" if isinstance(value, list) else "table"
    return "date or time"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
