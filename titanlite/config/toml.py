"""Parse TOML on every supported Python version, and format values as TOML."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from titanlite.errors import quote

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A number with thousands of digits raises ValueError, deep nesting RecursionError.
TOML_ERRORS = (tomllib.TOMLDecodeError, ValueError, RecursionError)
parse_toml = tomllib.loads
"""The tables of a TOML text; raises one of TOML_ERRORS."""


def put(values: dict[str, Any], name: str, value: Any) -> None:
    """Set the key with this dotted name; tables that are missing are added."""
    *sections, leaf = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return  # reported when the file's values are checked
    values[leaf] = value


def has(values: Any, name: str) -> bool:
    """Whether the key or table with this dotted name is there."""
    for part in name.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def drop(values: Any, name: str) -> None:
    """Remove the key or table with this dotted name, if it is there."""
    *sections, leaf = name.split(".")
    for section in sections:
        values = values.get(section, {})
    values.pop(leaf, None)


_LIST = re.compile(r"""\s*[\w.'"-]+\s*=\s*\[""")
_KEY_OR_SECTION = re.compile(r"""\s*([\w.'"-]+\s*=|\[\[?[\w.-]+\]\]?\s*(#.*)?$)""")
_TEXT_OR_COMMENT = re.compile(r"""\"(\\.|[^"\\])*"|'[^']*'|#.*""")


def unclosed_list(lines: Sequence[str], following: Sequence[str] = ()) -> int:
    """The number (from 1) of the line of `lines` that opens a list and never closes it; 0 if none.

    The parser failed at the last of `lines`. A list that is closed in `following`, before the next
    key or section, does not count.
    """
    for number in range(len(lines), 0, -1):
        if not _LIST.match(lines[number - 1]):
            continue
        depth = 0
        for line in [*lines[number - 1 :], *following]:
            if line is not lines[number - 1] and _KEY_OR_SECTION.match(line):
                break
            bare = _TEXT_OR_COMMENT.sub("", line)
            depth += bare.count("[") - bare.count("]")
            if depth <= 0:
                return 0
        return number
    return 0


def show(value: Any) -> str:
    """`value` as TOML on one line; "none" for None."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return quote(value)
        case float():
            return repr(value).replace("e-0", "e-")
        case list() | tuple():
            return "[" + ", ".join(map(show, value)) + "]"
        case dict():
            pairs = (
                f"{quote(name) if '.' in name else show_name(name)} = {show(item)}"
                for name, item in value.items()
            )
            return "{" + ", ".join(pairs) + "}"
    return str(value)


def show_name(name: str) -> str:
    """The name of a key or section, quoted if TOML requires it."""
    return name if re.fullmatch(r"[A-Za-z0-9_.-]+", name) else quote(name)
