"""Who may import whom, read from the source: the floors of the core, and the wall to the tools.

An import inside a function counts, and so does a module's name in a string, also in one that is
put together: f"titanlite.{name}".
"""

import ast
import fnmatch
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "titanlite").rglob("*.py"), *(ROOT / "models").rglob("*.py")])

FLOORS = (
    ("version", "errors", "fields", "files", "lazy", "pickles", "observe.terminal"),
    ("quantities", "plan_row", "registry"),
    ("mesh", "schedule"),
    # What a feature tells of itself without torch.
    ("parallelize.feature", "parallelize.*.spec", "parallelize.compile.backends"),
    ("parallelize.steps",),
    ("ranks",),
    ("modules",),
    ("parallelize",),
    ("training",),
    ("data",),
    ("models",),
    ("register",),
    ("config",),
    # Of parallelize/, what derives the arguments of the steps from a job's configuration.
    ("parallelize.part", "parallelize.*.step", "parallelize.parallelize"),
    ("plain_job",),
    ("job_parts",),
    ("job",),
    ("self_check", "start"),
    ("checkpoint",),
    ("observe",),
    ("callbacks",),
    ("run",),
    ("cli",),
    ("from_python",),
    ("__init__", "__main__", "preload"),
)
"""The core, from the ground up: what stands on a floor imports from its own and those below."""

TOOLS: dict[str, tuple[str, ...]] = {
    "by_hand": (),
    "convert": (),
    # A recorded step is drawn as the recorded runs of the lab.
    "debug": ("lab",),
    # Both commands read a checkpoint that somebody else may have written.
    "sample": ("convert",),
    # It draws samples of the trained model, and the timeline of a pipeline's step.
    "gallery": ("sample", "figures"),
    "figures": (),
    "simulate": ("figures",),
    # A step's operators and messages run on the simulator's streams.
    "planner": ("simulate", "figures"),
    "lab": ("figures",),
    # Each topic is simulated, measured by the lab, and planned.
    "learn": ("lab", "planner", "simulate", "figures"),
    # Its matrix is a page.
    "verify": ("figures",),
    # A job of TorchTitan is verified as any parallel code, and traced in the planner's fake world.
    "torchtitan": ("verify", "debug", "planner", "figures"),
}
"""Each tool, and the tools that it may import."""

COMMON = ("options", "tables")
"""What every command may import: its options, the files that they ask for, and tables."""

MAY_NAME_TOOLS = ("titanlite.cli", "titanlite")
"""The commands, and the public names that are imported at their first use."""

JOB_TYPES = {"titanlite.config.draft", "titanlite.config.schema"}
"""What the specs of features name for type checkers alone: the job that their keys are part of."""

CIRCLES = {
    # Sizes of a model that only transformers knows are judged by the model, which takes the sizes.
    ("titanlite.models.hf.config", "titanlite.models.hf.families"),
    # JobConfig.from_dict: a constructor stands on its class, and what reads a job takes the class.
    ("titanlite.config.schema", "titanlite.config.load"),
}
"""Imports that close a circle: (by, of)."""

EXCEPTIONS = {
    # For type checkers: packages that `import titanlite` makes known.
    ("titanlite", "titanlite.tools"),
    # What the fork server imports for all ranks, by name.
    ("titanlite.ranks.fork_server", "titanlite.preload"),
    # Functions that a user's own module calls are not themselves what registers.
    ("titanlite.registry", "titanlite.register"),
    # A key of the metadata of a file.
    ("titanlite.checkpoint.weights", "titanlite.config"),
}

# Path prefix -> module prefixes that must not be imported below it, not even inside a function.
MUST_NOT_IMPORT = {
    "titanlite/errors.py": ["titanlite", "torch"],
    "titanlite/files.py": ["titanlite", "torch"],
    "titanlite/quantities.py": ["titanlite", "torch"],
    "titanlite/plan_row.py": ["titanlite", "torch"],
    "titanlite/registry.py": ["titanlite", "torch"],
    "titanlite/fields.py": ["titanlite", "torch"],
    "titanlite/parallelize/feature.py": ["torch"],
    "titanlite/parallelize/steps.py": ["torch"],
    "titanlite/register.py": ["torch"],
    "titanlite/__init__.py": ["torch"],
    "titanlite/config": ["torch"],
    "titanlite/mesh/parallel_dims.py": ["torch"],
    "titanlite/ranks/report.py": ["torch", "titanlite.ranks"],
    "titanlite/ranks/signals.py": ["torch"],
    "titanlite/ranks/machine.py": ["torch"],
    # Processes know no axes, axes no processes.
    "titanlite/ranks": ["titanlite.mesh"],
    "titanlite/mesh": ["titanlite.ranks"],
    "titanlite/schedule": ["torch", "titanlite.mesh"],
    "titanlite/checkpoint/manifest.py": ["torch"],
    "titanlite/checkpoint/folder.py": ["torch"],
    "titanlite/data/catalog.py": ["torch", "numpy"],
    # Models draw by it, as they do by dropout.py.
    "titanlite/modules/keyed.py": ["titanlite"],
    # By hand, no step needs data, and no data a step.
    "titanlite/parallelize": ["titanlite.training", "titanlite.data", "titanlite.observe"],
    "titanlite/data": ["titanlite.parallelize"],
    "titanlite/training": ["titanlite.parallelize"],
    "titanlite/tools/gallery/__init__.py": ["torch"],
    "titanlite/tools/convert/stored.py": ["torch"],
    "titanlite/tools/simulate": ["torch"],
    # Pictures are drawn from plain values.
    "titanlite/tools/figures": [
        *("torch", "titanlite.config", "titanlite.data", "titanlite.job", "titanlite.models"),
        *("titanlite.parallelize", "titanlite.training"),
    ],
    # It builds everything from scratch; tests compare its results with the core's.
    "titanlite/tools/lab": ["titanlite.parallelize", "titanlite.job"],
    # What verifies any parallel code knows nothing of jobs.
    "titanlite/tools/verify/program": [
        *("titanlite.config", "titanlite.job", "titanlite.parallelize")
    ],
    "models/__init__.py": ["torch"],
    "models/spec.py": ["torch"],
    "models/sizes.py": ["torch"],
}

# Of these folders only the modules that run on ranks, or trace, import torch.
WITH_TORCH = {
    "titanlite/tools/verify": (
        *("agreement", "cells", "formulas", "gloo", "inspect_model", "job_trace", "opened"),
        *("events", "parts", "recurrence", "reload", "routing", "run", "sequences", "step_files"),
        *("contents", "perturbation", "subject", "tracing", "watching"),
    ),
    "titanlite/tools/verify/program": (
        *("batches", "building", "code_trace", "gradient_modes", "lines", "lines_backward"),
        *("parallel", "received", "reference", "saved", "step_trace", "through", "uses", "values"),
        *("local_parts", "loss_terms", "operators", "weights"),
    ),
}
PLANNED_WITHOUT_TORCH = (
    *("__init__", "command", "composition", "cost", "data_parallel", "events", "hardware", "html"),
    *("local", "lower", "planning", "predict", "report", "spans", "timing"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("titanlite", *parts) if parts[0] == "models" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def statements(tree: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """All statements; without `types`, not those under `if TYPE_CHECKING`."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, part, ()):
            if types or not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
                yield node
                yield from statements(node, types=types)


def imports(tree: ast.AST, *, types: bool = False) -> Iterator[str]:
    """What is imported, as "module.name"; with `types`, also what only a type checker imports."""
    for node in statements(tree, types=types):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def named(tree: ast.AST, module: str = "") -> Iterator[str]:
    """The modules of titanlite that a string of `module` names, alone or as "module:attribute".

    An f-string names the modules that it becomes with the strings of the file filled in; if none
    of them fits, those of any word.
    """
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for text in strings:
        found = re.fullmatch(r"(titanlite(?:\.\w+)+)(?::[\w.]+)?", text)
        if found and found[1] in MODULES:
            yield found[1]
    package = (
        module if MODULES.get(module, Path()).stem == "__init__" else module.rpartition(".")[0]
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pattern, own = "", {"__name__": module, "__package__": package}
            for part in node.values:
                if isinstance(part, ast.Constant):
                    pattern += re.escape(str(part.value).partition(":")[0])
                    if ":" in str(part.value):
                        break
                elif isinstance(part, ast.FormattedValue):
                    name = ast.unparse(part.value)
                    pattern += re.escape(own[name]) if name in own else r"([\w.]+)"
            if pattern.startswith(r"titanlite\."):
                fits = [found for name in MODULES if (found := re.fullmatch(pattern, name))]
                known = [found for found in fits if strings.issuperset(found.groups())]
                words = [found for found in fits if "." not in "".join(found.groups())]
                yield from (found[0] for found in known or words)


def module_of(name: str) -> str:
    """The module of titanlite that "module.name" is of, or is."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def uses(path: Path) -> set[str]:
    """The other modules of titanlite that a file imports or names."""
    text = path.read_text()
    tree = ast.parse(text)
    found = {module_of(name) for name in imports(tree, types=True) if is_below(name, "titanlite")}
    if is_torch_free_feature(module_name(path)):
        run = {module_of(name) for name in imports(tree)}
        found = {name for name in found if name in run or name not in JOB_TYPES}
    if re.search(r"""["']titanlite\.|__name__|__package__""", text):
        found.update(named(tree, module_name(path)))
    return found - {module_name(path)}


def is_torch_free_feature(module: str) -> bool:
    names = ("feature", "steps", "*.spec")
    return any(fnmatch.fnmatch(module, f"titanlite.parallelize.{name}") for name in names)


def is_below(module: str, prefix: str) -> bool:
    return f"{module}.".startswith(f"{prefix}.")


def floor_of(module: str) -> int:
    """The number of a core module's floor, of the longest entry that names it."""
    inside = "__init__" if module == "titanlite" else module.removeprefix("titanlite.")
    fits = [
        (len(entry), number)
        for number, entries in enumerate(FLOORS)
        for entry in entries
        if is_below(inside, entry) or fnmatch.fnmatch(inside, entry)
    ]
    assert fits, f"{module} stands on no floor"
    return max(fits)[1]


def tool_of(module: str) -> str | None:
    return module.split(".")[2] if module.startswith("titanlite.tools.") else None


def test_the_core_is_built_in_floors_and_knows_no_tool() -> None:
    for module in MODULES:
        check_floors(module)


def check_floors(module: str) -> None:
    own = tool_of(module)
    for used in sorted(uses(MODULES[module])):
        if (module, used) in EXCEPTIONS or module == "titanlite.tools":
            continue
        other = tool_of(used)
        if own is not None:
            allowed = other is None or other in (own, *COMMON, *TOOLS.get(own, ()))
            assert allowed, f"{module} imports {used}: another tool"
            assert used not in MAY_NAME_TOOLS, f"{module} imports {used}"
        elif other is not None:
            assert module in MAY_NAME_TOOLS, f"{module} imports {used}: the core knows no tool"
        else:
            assert floor_of(used) <= floor_of(module), f"{module} imports {used}: from above"


def private_names(module: str) -> Iterator[str]:
    """The private names of other parts of titanlite that a module imports or reads."""
    tree = ast.parse(MODULES[module].read_text())
    own = tool_of(module) or module
    aliases = set()
    for node in statements(tree, types=True):
        if isinstance(node, ast.ImportFrom) and is_below(node.module or "", "titanlite"):
            for name in node.names:
                found = f"{node.module}.{name.name}"
                if (tool_of(module_of(found)) or module_of(found)) == own:
                    continue
                if name.name.startswith("_"):
                    yield found
                if found in MODULES:
                    aliases.add(name.asname or name.name)
    for node in ast.walk(tree) if aliases else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            if node.value.id in aliases and is_private:
                yield f"{node.value.id}.{node.attr}"


def patched(module: str) -> Iterator[str]:
    """The names of titanlite's core that a module gives to mock's patch."""
    text = MODULES[module].read_text()
    if "patch" not in text:
        return
    tree = ast.parse(text)
    core = {
        name.asname or name.name
        for node in statements(tree, types=True)
        if isinstance(node, ast.ImportFrom) and is_below(node.module or "", "titanlite")
        for name in node.names
        if tool_of(module_of(f"{node.module}.{name.name}")) is None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("patch"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Name) and argument.id in core:
                    yield argument.id


def test_tools_use_the_cores_public_names_and_patch_none() -> None:
    for module in filter(tool_of, MODULES):
        assert not list(private_names(module)), module
        assert not list(patched(module)), module


def test_tools_import_each_other_in_no_circle() -> None:
    folders = {path.name for path in (ROOT / "titanlite/tools").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(TOOLS)
    assert circle({tool: set(others) for tool, others in TOOLS.items()}) == []


def rules(name: str) -> list[str]:
    found = [
        bad for start, bads in MUST_NOT_IMPORT.items() if name.startswith(start) for bad in bads
    ]
    folder, _, file = name.removesuffix(".py").rpartition("/")
    # What a job is checked by, before anything is read or trained.
    is_sizes = name.startswith("models/") and file == "config"
    is_spec = name.startswith(("titanlite/data/", "titanlite/parallelize/")) and file == "spec"
    if is_sizes or is_spec:
        found += ["torch", "numpy"]
    if folder in WITH_TORCH and file not in WITH_TORCH[folder]:
        found += ["torch", "titanlite.job"]
    if folder == "titanlite/tools/planner" and file in PLANNED_WITHOUT_TORCH:
        found += ["torch"]
    return found


def test_imports() -> None:
    for path in SOURCES:
        check_imports(path)


def check_imports(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    for module in imports(ast.parse(path.read_text())):
        # That tokens are pixels is known to the image data sets alone; that they are text, to those
        # of text.
        for kind in ("images", "text"):
            knows = name.startswith(f"titanlite/data/{kind}/") or name.endswith("data/catalog.py")
            assert knows or not is_below(module, f"titanlite.data.{kind}"), f"{name}: {module}"
        # One name for each class: the folder models/ is titanlite.models.
        assert not is_below(module, "models"), f"{name} imports {module}"
        bad = [bad for bad in rules(name) if is_below(module, bad)]
        assert not bad, f"{name} imports {module}"
        if name.startswith("models/") and path.parent.name != "models":
            own = f"titanlite.models.{path.parent.name}"
            shared = ("sizes", "spec", "hf_format")
            allowed = (own, *(f"titanlite.models.{one}" for one in shared))
            others = is_below(module, "titanlite.models") and not module.startswith(allowed)
            assert not others, f"{name}: {module}"
        if name.startswith("models/") and name.endswith("/model.py"):
            # A plain model: of titanlite it has layers. transformers' also need a stand-in.
            allowed = ("titanlite.modules", own)
            if name == "models/hf/model.py":
                allowed += (
                    "titanlite.parallelize.context_parallel.huggingface",
                    "titanlite.errors",
                )
            assert not is_below(module, "titanlite") or module.startswith(allowed), (
                f"{name}: {module}"
            )


def test_what_needs_no_torch_loads_none() -> None:
    """Schedules, meshes and losses are drawn without torch, nor does what they import load it."""
    recorded = {"ending", "pipeline_timeline", "communication"}
    folders = {"titanlite.tools.figures": set(), "titanlite.tools.gallery": recorded}
    lines = []
    for package, left_out in folders.items():
        folder = ROOT / package.replace(".", "/")
        names = {path.stem for path in folder.glob("*.py")} - {"__init__", *left_out}
        lines.append(f"from {package} import {', '.join(sorted(names))}")
    code = "\n".join([*lines, "import sys; print(*sys.modules)"])
    run = [sys.executable, "-c", code]
    loaded = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "torch" not in loaded.split()


def test_compare_is_imported_without_torch() -> None:
    """And only at its first use, so that `import titanlite` loads nothing."""
    code = "import sys, titanlite; print(*sys.modules, '|'); titanlite.compare; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    loaded = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    before, _, after = loaded.partition("|")
    assert "titanlite.tools" not in before.split()
    assert "titanlite.tools.verify.program.comparison" in after.split()
    assert "torch" not in after.split()


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """What each module of `sources` (name -> text) imports of the others, types' imports counted.

    Imports inside functions count: who reads one module of a circle has to know all of them.
    """

    def targets(tree: ast.AST) -> Iterator[str]:
        for name in imports(tree, types=True):
            yield name if name in sources else name.rpartition(".")[0] or name

    return {
        name: ({*targets(ast.parse(text))} & sources.keys())
        - (JOB_TYPES if is_torch_free_feature(name) else set())
        - {used for by, used in CIRCLES if by == name}
        for name, text in sources.items()
    }


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


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = circle(graph({name: path.read_text() for name, path in MODULES.items()}))
    assert not found, " -> ".join([*found, found[0]])


def test_what_tests_replace_exists() -> None:
    """Also in tests that run seldom: `patch` and `setattr` take a name in a string."""
    texts = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    pattern = r"""\b(?:patch|setattr)\(\s*"(titanlite\.[\w.]+)""" + '"'
    names = {name for text in texts for name in re.findall(pattern, text)}
    assert len(names) > 15
    for name in names:
        pkgutil.resolve_name(name)


def test_circles_are_found() -> None:
    sources = {
        "p": "import json\n",
        "p.a": "from p import b\nimport p.c\n",
        "p.b": "if TYPE_CHECKING:\n    from p.c import name\n",
        "p.c": "from p import name\ndef f():\n    from p import d\n",
        "p.d": "",
    }
    imported = graph(sources)
    a, b = {"p.b", "p.c"}, {"p.c"}
    assert imported == {"p": set(), "p.a": a, "p.b": b, "p.c": {"p", "p.d"}, "p.d": set()}
    assert circle(imported) == []
    assert circle(imported | {"p.c": {"p.b"}}) == ["p.b", "p.c"]
    assert circle({"p": {"p"}}) == ["p"]


def test_the_rules_can_fail() -> None:
    source = "def f():\n    import torch.nn\n    from titanlite.data import catalog\n"
    assert list(imports(ast.parse(source))) == ["torch.nn", "titanlite.data.catalog"]
    text = "run('titanlite.job:build_job'); x = 'titanlite.jobs'; y = 'titanlite.tools.planner'\n"
    assert set(named(ast.parse(text))) == {"titanlite.job", "titanlite.tools.planner"}
    text = "load(f'titanlite.parallelize.{name}.step:STEP')\n"
    assert "titanlite.parallelize.fsdp.step" in set(named(ast.parse(text)))
    text += "for name in ('ddp', 'fsdp'): pass\n"
    assert set(named(ast.parse(text))) == {"titanlite.parallelize.fsdp.step"}
    text = "load(f'{__package__}.{TABLE[name]}'); TABLE = {'AxisName': 'parallel_dims'}\n"
    assert set(named(ast.parse(text), "titanlite.mesh")) == {"titanlite.mesh.parallel_dims"}
    assert module_of("titanlite.job.build_job") == "titanlite.job"
    assert is_below("torch.nn", "torch")
    assert not is_below("torchvision", "torch")
    assert "torch" in rules("models/image_transformer/config.py")
    assert "torch" in rules("titanlite/config/load.py")
    assert "torch" in rules("titanlite/tools/verify/diagnose.py")
    assert "torch" not in rules("titanlite/tools/verify/run.py")
    assert "torch" not in rules("models/image_transformer/model.py")
    assert floor_of("titanlite.parallelize.fsdp.apply") < floor_of("titanlite.config.load")
    assert floor_of("titanlite.parallelize.fsdp.spec") < floor_of("titanlite.parallelize.steps")
    assert floor_of("titanlite.config.load") < floor_of("titanlite.parallelize.fsdp.step")
    with pytest.raises(AssertionError):
        floor_of("titanlite.verify")
