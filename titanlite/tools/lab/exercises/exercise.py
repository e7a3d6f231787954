"""Exercise: a task, its worked solution, and what an answer is judged by."""

import ast
import importlib
import inspect
import runpy
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.errors import ConfigError, suggest
from titanlite.tools.lab.exercises import EXERCISES
from titanlite.tools.lab.mesh import Mesh


@dataclass(frozen=True)
class Exercise:
    """A function that runs on every device, as `function(device, *args)`.

    Its name and docstring are the task. `inputs(rank)` gives the arguments of a rank, and
    `expected(arguments of all ranks)` the results of all ranks: tensors, numbers, text, None, or
    lists of these. An answer may send as many messages and bytes as the worked solution, in as many
    steps on the clock of the record. `forbidden` are the collectives of the device that the answer
    has to build itself. With `num_parts`, the inputs are `tagged(rank, num_parts)` (pictures.py),
    so that messages are named by the parts they contain. `points` are those of a course.
    """

    solution: Callable[..., Any]
    hint: str
    inputs: Callable[[int], tuple[Any, ...]]
    expected: Callable[[Sequence[tuple[Any, ...]]], Sequence[Any]]
    mesh: Mesh = field(default_factory=lambda: Mesh(rank=4))
    algorithm: str = "ring"
    forbidden: tuple[str, ...] = ()
    num_parts: int = 0
    points: int = 2

    @property
    def name(self) -> str:
        return self.solution.__name__

    @property
    def solution_text(self) -> str:
        return "import torch\n\n\n" + textwrap.dedent(inspect.getsource(self.solution))

    @property
    def skeleton(self) -> str:
        """A file to start from: the signature and the docstring."""
        source = textwrap.dedent(inspect.getsource(self.solution))
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef)
        head = "\n".join(source.splitlines()[: function.body[0].end_lineno])
        return (
            f"import torch\n\n\n{head}\n"
            f'    raise NotImplementedError("{self.name} is not written yet")\n'
        )


def load_exercise(name: str) -> Exercise:
    """The exercise of a name. Raises ConfigError for an unknown one."""
    if name not in EXERCISES:
        every = f"`titanlite lab exercise` lists all {len(EXERCISES)}"
        raise ConfigError(f"exercise: there is no {name!r}; {suggest(name, EXERCISES, every)}")
    return importlib.import_module(f"{__package__}.{name}").EXERCISE


def load_answer(path: str | Path, name: str) -> Callable[..., Any]:
    """The function `name` of a file. Raises ConfigError if there is none, or the file fails."""
    try:
        # A module that does not exist: the function is sent to the ranks by value.
        found = runpy.run_path(str(path), run_name="answer")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; `titanlite lab exercise {name} {path} --start` "
            "writes one to start from"
        ) from None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (own[-1] if own else None)
        place = f"{path}:{line}" if line else str(path)
        raise ConfigError(f"{place}: {type(error).__name__}: {error}") from error
    if not callable(found.get(name)):
        raise ConfigError(f"{path}: has no function {name}; define {name}(device, ...) in it")
    return found[name]
