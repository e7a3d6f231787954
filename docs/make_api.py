"""Write docs/api: the public names of titanlite with their signatures and docstrings.

python docs/make_api.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import titanlite
from titanlite import mesh, modules, parallelize, ranks, training
from titanlite.mesh.parallel_dims import Grid
from titanlite.tools import by_hand, planner, verify

FOLDER = Path(__file__).parent / "api"
INTRODUCTION = """\
# The public names of titanlite

`import titanlite` provides the names of the first list, and the packages with the others, as
`titanlite.training.Trainer`. They are stable: other names, and members of classes that are not on
these pages, may change between versions. `python docs/make_api.py` writes the pages.
"""
PURPOSES = {
    "from_python": "A job",
    "config": "Its configuration",
    "register": "Your own model, data, loss",
    "parallelize": "A model, made parallel by hand",
    "tools.by_hand.checkpoints": "Checkpoints",
    "ranks.launch": "Local ranks",
    "errors": "Errors",
}
"""What a group of names is for; the modules after one without a purpose belong to its group."""
GUIDES = {
    "train": "own_model.md",
    "verify": "verify.md",
    "plan": "own_model.md",
    "compare": "compare.md",
    "assert_equivalent": "compare.md",
    "register_model": "own_model.md",
    "register_dataset": "data.md",
    "register_loss": "losses.md",
    "register_metric": "own_model.md",
    "register_optimizer": "own_model.md",
    "register_scheduler": "own_model.md",
    "ParallelPlan": "own_model.md",
    "apply_tp": "by_hand.md",
    "apply_cp": "by_hand.md",
    "apply_ac": "by_hand.md",
    "apply_fsdp": "by_hand.md",
    "save_checkpoint": "by_hand.md",
    "load_checkpoint": "by_hand.md",
    "save_hf": "huggingface.md",
    "load_hf": "huggingface.md",
    "spawn": "by_hand.md",
    "open_world": "by_hand.md",
}
"""A page with an example of a name."""
EXAMPLES = {
    "JobConfig": 'job = titanlite.JobConfig.from_dict({"training": {"steps": 100}})',
    "load_config": 'job = titanlite.load_config("configs/tp2_fsdp2.toml", {"training.steps": 100})',
    "parse_args": 'job = titanlite.parse_args(["--training.steps=100"])',
    "apply_float8": 'titanlite.apply_float8(model, "rowwise", filter_fqns=["output"])',
    "apply_ep": "titanlite.apply_ep(model, meshes.ep, tp_mesh=meshes.tp, cp_mesh=meshes.cp)",
    "apply_compile": 'titanlite.apply_compile(model, backend="eager")',
    "apply_ddp": "titanlite.apply_ddp(model, meshes.dp)",
    "TitanliteError": "try: ...\nexcept titanlite.TitanliteError as error: print(error)",
    "ConfigError": "try: ...\nexcept titanlite.ConfigError as error: print(error.problems)",
    "RankError": "try: ...\nexcept titanlite.RankError as error: print(error.rank, error.message)",
}
"""An example of a name that no page has."""
MEMBERS = {
    "JobConfig": ("from_dict",),
    "Comparison": ("name", "losses", "check"),
    "Layout": ("num_local", "positions", "shard", "unshard"),
    "ParallelDims": (
        *("axes_in_use", "coordinates", "counts_loss", "data_rank", "degree_of", "degrees", "dp"),
        *("group", "rank", "token_rank", "world_size"),
    ),
    "World": ("is_first", "name_places", "set_timeout"),
    "Place": ("orders",),
    "Meshes": ("ep", "expert_dp"),
    "TitanliteError": ("rank",),
    "Batch": ("count_targets", "input", "replace", "rows", "shard", "to"),
}
"""The members that are public, of classes that have others for titanlite's own use."""
RESULTS = {"TrainResult", "Event", "PlanResult", "VerifyResult", "Comparison"}
"""What titanlite makes and a program only reads."""
PACKAGES = {
    "titanlite": titanlite.PUBLIC,
    "titanlite.callbacks": {"": ("TrainResult", "Event")},
    "titanlite.tools.verify": verify.PUBLIC,
    "titanlite.tools.planner": planner.PUBLIC,
    "titanlite.tools.by_hand": by_hand.PUBLIC,
    "titanlite.parallelize": parallelize.PUBLIC,
    "titanlite.training": training.PUBLIC,
    "titanlite.modules": modules.PUBLIC,
    "titanlite.mesh": mesh.PUBLIC,
    "titanlite.ranks": ranks.PUBLIC,
    "titanlite.schedule": {"generators": ("make_schedule",)},
}
"""The public names of each package, by module; a name is documented where it first occurs."""


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The name of each file and its text: a page per package, and a list of all names."""
    found, listed, known = {}, [INTRODUCTION], set[str]()
    for package, modules_of in PACKAGES.items():
        file = f"{package.rpartition('.')[2]}.md"
        entries = [f"# {package}\n"]
        listed.append(f"## [{package}]({file})\n")
        groups: dict[str, list[str]] = {"": []}
        for module, names in modules_of.items():
            home = f"{package}.{module}" if module else package
            if package == "titanlite" and module in PURPOSES:
                groups[PURPOSES[module]] = []
            links = list(groups.values())[-1]
            for name in names:
                if name in known:
                    continue
                known.add(name)
                thing = getattr(importlib.import_module(package), name)
                entries.append("\n".join([*entry(name, home, thing), ""]))
                links.append(f"[{name}]({file}#{name.lower()})")
        for purpose, links in groups.items():
            if links:
                text = f"- {purpose}: {', '.join(links)}" if purpose else ", ".join(links)
                listed.append(textwrap.fill(text, 100, subsequent_indent="  " * bool(purpose)))
        listed.append("")
        found[file] = "\n".join(entries)
    return {"README.md": "\n".join(listed).rstrip() + "\n", **found}


def entry(name: str, module: str, thing: Any) -> list[str]:
    """The lines of one name."""
    example = f" ([example](../{GUIDES[name]}))" if name in GUIDES else ""
    lines = [f"## {name}", f"`{module}`{example}", ""]
    if not callable(thing):
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
        return [*lines, f"A `{type(thing).__name__}`. {strings_under(tree.body)[name]}"]
    if name not in RESULTS:
        code = [*declared(name, thing), *EXAMPLES.get(name, "").splitlines()]
        lines += ["```python", *code, "```", ""]
    lines.append(documented(thing))
    if not inspect.isclass(thing):
        return lines
    fields = {
        field: text
        for field, text in documented_fields(thing).items()
        if field in MEMBERS.get(name, (field,))
    }
    members = [f"- **`{field}`**: {text}" for field, text in fields.items()]
    # A ParallelDims is a grid of ranks; what other classes inherit is not titanlite's.
    own = {**vars(Grid), **vars(thing)} if issubclass(thing, Grid) else vars(thing)
    for member, value in inspect.getmembers_static(thing):
        if member.startswith("_") or member not in own or member not in MEMBERS.get(name, own):
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property) and inspect.getdoc(value):
            members.append(f"- **`{member}`**: {one_paragraph(value)}")
        elif inspect.isfunction(function) and function.__doc__:
            members.append(f"- **`{member}{shortened(function)}`**: {one_paragraph(function)}")
    return [*lines, "", *members] if members else lines


def documented_fields(thing: type) -> dict[str, str]:
    """The fields of a class that have a string under them, and that string."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(tree, ast.ClassDef)
    return strings_under(tree.body)


def strings_under(body: list[ast.stmt]) -> dict[str, str]:
    """The names that have a string under their assignment, and that string."""
    found = {}
    for assignment, following in itertools.pairwise(body):
        if isinstance(assignment, ast.AnnAssign):
            target: ast.expr = assignment.target
        elif isinstance(assignment, ast.Assign):
            target = assignment.targets[0]
        else:
            continue
        text = following.value if isinstance(following, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
            found[target.id] = " ".join(str(text.value).split())
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
    before = re.sub(r"""^(\S+: )?(['"])(.*)\2$""", r"\1\3", re.sub(r"(?:\w+\.)+(?=\w)", "", before))
    return f"{before}{equals}{'...' if default.startswith('<') else default}"


def documented(thing: Any) -> str:
    """The docstring, with its list of arguments (`name: what it is`) as a list of Markdown."""
    lines = []
    # A list begins after an empty line: a line of prose may also begin with a word and a colon.
    is_list = True
    for line in (inspect.getdoc(thing) or "").strip().splitlines():
        item = re.match(r"([a-z_]+): (?=\S)", line)
        if is_list and item:
            line = f"- `{item[1]}`: {line[item.end() :]}"
        elif line:
            is_list = is_list and line.startswith(" ")
        else:
            is_list = True
        lines.append(line)
    return "\n".join(lines)


def one_paragraph(thing: Any) -> str:
    return " ".join(documented(thing).split())


def shortened(function: Any) -> str:
    """The names of a method's arguments."""
    parameters = inspect.signature(function).parameters
    return f"({', '.join(name for name in parameters if name not in ('self', 'cls'))})"


if __name__ == "__main__":
    main()
