"""Who may import whom, read from the source: the rules that docs/architecture.md gives."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "titanlite").rglob("*.py"), *(ROOT / "models").rglob("*.py")])

# Path prefix -> module prefixes that must not be imported below it, not even inside a function.
MUST_NOT_IMPORT = {
    "titanlite/errors.py": ["titanlite", "models", "torch"],
    "titanlite/files.py": ["titanlite", "models", "torch"],
    "titanlite/mesh/parallel_dims.py": ["titanlite.config", "models", "torch"],
    "titanlite/config": ["torch", "titanlite.job", "titanlite.parallelize", "titanlite.training"],
    "titanlite/ranks/report.py": ["torch", "titanlite.ranks", "titanlite.mesh", "titanlite.job"],
    "titanlite/ranks/signals.py": ["torch"],
    "titanlite/ranks/machine.py": ["torch"],
    # Processes know no axes, axes no processes, and neither of them what is trained.
    "titanlite/ranks": ["titanlite.mesh", "titanlite.config", "titanlite.job", "titanlite.models"],
    "titanlite/mesh": ["titanlite.ranks", "titanlite.config", "titanlite.job", "titanlite.models"],
    "titanlite/checkpoint/manifest.py": ["torch"],
    "titanlite/checkpoint/folder.py": ["torch"],
    "titanlite/schedule": ["torch", "titanlite.drawing"],
    "titanlite/simulate": ["torch"],
    "titanlite/attention": ["titanlite.drawing"],
    # The layers themselves, which models are built of.
    "titanlite/experts": ["titanlite.parallelize", "titanlite.training", "titanlite.job"],
    # What is drawn comes as plain values.
    "titanlite/drawing": [
        *("torch", "titanlite.config", "titanlite.data", "titanlite.job", "titanlite.models"),
        *("titanlite.observe", "titanlite.parallelize", "titanlite.simulate", "titanlite.training"),
    ],
    **{
        f"titanlite/verify/{name}.py": ["torch", "titanlite.job"]
        for name in (
            "command",
            "compare",
            "covering",
            "diagnose",
            "evidence",
            "experts",
            "gradients",
            "inputs",
            "jobs",
            "matrix",
            "norms",
            "overview",
            "passes",
            "pool",
            "record",
            "report",
            "result",
            "shares",
            "shrink",
            "updates",
            "verify",
            "words",
        )
    },
    # What verifies any parallel code knows nothing of jobs; its side of the caller loads no torch.
    "titanlite/equivalence": ["titanlite.config", "titanlite.job", "titanlite.parallelize"],
    **{
        f"titanlite/equivalence/{name}.py": ["torch"]
        for name in ("__init__", "comparison", "findings", "grid", "report", "request")
    },
    **{
        f"titanlite/plan/{name}.py": ["torch"]
        for name in (
            "__init__",
            "command",
            "composition",
            "cost",
            "data_parallel",
            "events",
            "hardware",
            "html",
            "local",
            "planning",
            "predict",
            "report",
            "spans",
            "timing",
        )
    },
    "titanlite/__init__.py": ["torch"],
    "titanlite/data/catalog.py": ["torch", "numpy"],
    # Models draw by them, as they do by dropout.py.
    "titanlite/keyed.py": ["titanlite"],
    "titanlite/draws.py": ["titanlite.job", "titanlite.parallelize", "titanlite.training"],
    "titanlite/batch.py": ["titanlite.job", "titanlite.parallelize", "titanlite.training"],
    # By hand, no step needs the configuration.
    "titanlite/parallelize": [
        "titanlite.config",
        "titanlite.training",
        "titanlite.data",
        "titanlite.observe",
    ],
    "titanlite/plan_row.py": ["titanlite", "torch"],
    "titanlite/training": ["titanlite.parallelize", "titanlite.data", "titanlite.observe"],
    "titanlite/data": ["titanlite.parallelize", "titanlite.training", "titanlite.observe"],
    "titanlite/observe": ["titanlite.parallelize", "titanlite.training", "titanlite.data"],
    "titanlite/lab": ["titanlite.parallelize", "titanlite.job"],
    "models/__init__.py": ["torch", "titanlite"],
    "models/sizes.py": ["torch"],
}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that are run: what stands under `if TYPE_CHECKING` is for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from nodes(node)


def imports(path: Path) -> Iterator[str]:
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def is_below(module: str, prefix: str) -> bool:
    return f"{module}.".startswith(f"{prefix}.")


def rules(name: str) -> list[str]:
    starts = [start for start in MUST_NOT_IMPORT if name.startswith(start)]
    # What a job is checked by, before anything is read or trained.
    is_sizes = name.startswith("models/") and name.endswith("/config.py")
    is_spec = name.startswith("titanlite/data/") and name.endswith("/spec.py")
    own = ["torch", "numpy"] if is_sizes or is_spec else []
    return sum((MUST_NOT_IMPORT[start] for start in starts), own)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for module in imports(path):
        # That tokens are pixels is known to the image data sets alone.
        knows_images = name.startswith("titanlite/data/images/") or name.endswith("data/catalog.py")
        assert knows_images or not is_below(module, "titanlite.data.images"), f"{name}: {module}"
        # That they are text, to the text data sets.
        knows_text = name.startswith("titanlite/data/text/") or name.endswith("data/catalog.py")
        assert knows_text or not is_below(module, "titanlite.data.text"), f"{name}: {module}"
        # One name for each class: the folder models/ is titanlite.models.
        assert not is_below(module, "models"), f"{name} imports {module}"
        assert not any(is_below(module, bad) for bad in rules(name)), f"{name} imports {module}"
        if name.startswith("models/") and path.parent.name != "models":
            own = f"titanlite.models.{path.parent.name}"
            allowed = (own, "titanlite.models.sizes")
            others = is_below(module, "titanlite.models") and not module.startswith(allowed)
            assert not others, f"{name}: {module}"
        if name.startswith("models/") and name.endswith("/model.py"):
            allowed = ("attention", "dropout", "experts", "keyed")
            allowed = (*(f"titanlite.{name}" for name in allowed), own)
            assert not is_below(module, "titanlite") or module.startswith(allowed), module


def test_schedules_meshes_and_losses_are_drawn_without_torch() -> None:
    """Nothing they import loads it either; the ring's layouts are torch's."""
    folder = ROOT / "titanlite/drawing"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "ring"}
    code = f"from titanlite.drawing import {', '.join(names)}; import sys; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    loaded = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "torch" not in loaded.split()


def test_compare_is_imported_without_torch() -> None:
    """And only at its first use, so that `import titanlite` loads nothing."""
    code = "import sys, titanlite; print(*sys.modules, '|'); titanlite.compare; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    loaded = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    before, _, after = loaded.partition("|")
    assert "titanlite.equivalence" not in before.split()
    assert "titanlite.equivalence.comparison" in after.split()
    assert "torch" not in after.split()


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """What each module of `sources` (name -> text) imports of the others, types' imports counted.

    Imports inside functions are left out: they run when all modules are there.
    """

    def targets(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (name.name for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                for name in child.names:
                    inside = f"{child.module}.{name.name}"
                    yield inside if inside in sources else str(child.module)
            elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from targets(child)

    return {name: {*targets(ast.parse(text))} & sources.keys() for name, text in sources.items()}


def circle(imported: Mapping[str, set[str]]) -> list[str]:
    """Modules each of which imports the next, and the last one the first; none if no such are."""
    done: set[str] = set()

    def follow(way: list[str]) -> list[str]:
        for module in sorted(imported[way[-1]] - done):
            if module in way:
                return way[way.index(module) :]
            if found := follow([*way, module]):
                return found
        done.add(way[-1])
        return []

    return next((found for module in sorted(imported) if (found := follow([module]))), [])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("titanlite", *parts) if parts[0] == "models" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = circle(graph({module_name(path): path.read_text() for path in SOURCES}))
    assert not found, " -> ".join([*found, found[0]])


def test_circles_are_found() -> None:
    sources = {
        "p": "import json\n",
        "p.a": "from p import b\nimport p.c\n",
        "p.b": "if TYPE_CHECKING:\n    from p.c import name\n",
        "p.c": "from p import name\ndef f():\n    from p import a\n",
    }
    imported = graph(sources)
    assert imported == {"p": set(), "p.a": {"p.b", "p.c"}, "p.b": {"p.c"}, "p.c": {"p"}}
    assert circle(imported) == []
    assert circle(imported | {"p.c": {"p.b"}}) == ["p.b", "p.c"]
    assert circle({"p": {"p"}}) == ["p"]


def test_the_rules_can_fail(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("def f():\n    import torch.nn\n    from titanlite.data import catalog\n")
    assert list(imports(source)) == ["torch.nn", "titanlite.data.catalog"]
    assert is_below("torch.nn", "torch")
    assert not is_below("torchvision", "torch")
    assert "torch" in rules("models/image_transformer/config.py")
    assert "torch" in rules("titanlite/config/load.py")
    assert "torch" not in rules("models/image_transformer/model.py")
