"""Print docs/api.md: the public names of titanlite with their signatures and docstrings.

python docs/make_api.py > docs/api.md
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

from pydantic import BaseModel

import titanlite

INTRODUCTION = """\
# The public names of titanlite

`import titanlite` provides the names below; each is imported when it is first used. They are
stable: other names may change between versions. This page is generated from the docstrings by
`python docs/make_api.py`. The keys of a job's TOML are in [configuration.md](configuration.md).
"""


def main() -> None:
    print(INTRODUCTION)
    for topic, modules in titanlite.PUBLIC.items():
        print(f"## {topic}\n")
        for module, names in modules.items():
            for name in names:
                print("\n".join(entry(name, f"titanlite.{module}")), end="\n\n")


def entry(name: str, module: str) -> list[str]:
    """The lines of one name."""
    thing = getattr(titanlite, name)
    lines = [f"### {name}", f"`{module}`", ""]
    if not callable(thing):
        return [*lines, f"A `{type(thing).__name__}`: {documented(thing)}"]
    lines += ["```python", *declared(name, thing), "```", "", documented(thing)]
    if not inspect.isclass(thing):
        return lines
    members = [f"- **`{field}`**: {text}" for field, text in documented_fields(thing).items()]
    for member, value in inspect.getmembers_static(thing):
        if member.startswith("_") or member not in vars(thing):
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property) and inspect.getdoc(value):
            members.append(f"- **`{member}`**: {one_paragraph(value)}")
        elif inspect.isfunction(function) and inspect.getdoc(function):
            members.append(f"- **`{member}{shortened(function)}`**: {one_paragraph(function)}")
    return [*lines, "", *members] if members else lines


def documented_fields(thing: type) -> dict[str, str]:
    """The fields of a class that have a string under them, and that string."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[field.target.id] = " ".join(text.value.split())
    return found


def declared(name: str, thing: Any) -> list[str]:
    """The declaration: the signature of a function, or that of a class's constructor."""
    word = "class" if inspect.isclass(thing) else "def"
    if inspect.isclass(thing) and (issubclass(thing, BaseModel) or "__init__" not in vars(thing)):
        return [f"{word} {name}"]
    signature = inspect.signature(thing)
    parameters = list(signature.parameters.values())
    ending = "" if inspect.isclass(thing) else f" -> {plain(signature.return_annotation)}"
    shown = [plain(str(parameter)) for parameter in parameters]
    keywords = [index for index, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if keywords and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        shown.insert(keywords[0], "*")
    text = f"{word} {name}({', '.join(shown)}){ending}"
    if len(text) <= 100:
        return [text]
    return [f"{word} {name}(", *(f"    {parameter}," for parameter in shown), f"){ending}"]


def plain(annotation: Any) -> str:
    """An annotation or a parameter: quotes around annotations removed, objects as `...`."""
    text = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    before, equals, default = text.partition(" = ")
    before = re.sub(r"(?:\w+\.)+(?=\w)", "", before.replace("'", ""))
    return f"{before}{equals}{'...' if default.startswith('<') else default}"


def documented(thing: Any) -> str:
    """The docstring, with its list of arguments (`name: what it is`) as a list of Markdown."""
    text = textwrap.dedent(inspect.getdoc(thing) or "").strip()
    return re.sub(r"^([a-z_]+): (?=\S)", r"- `\1`: ", text, flags=re.MULTILINE)


def one_paragraph(thing: Any) -> str:
    return " ".join(documented(thing).split())


def shortened(function: Any) -> str:
    """The names of a method's arguments."""
    parameters = inspect.signature(function).parameters
    return f"({', '.join(name for name in parameters if name not in ('self', 'cls'))})"


if __name__ == "__main__":
    main()
