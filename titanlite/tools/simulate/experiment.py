"""A strategy file: an experiment in one Python file.

It defines `strategy`, and as wanted `order`, `priority`, `max_in_flight`, `needs`, `costs` and
`network`. A function may take the job's sizes as one more parameter: `strategy(work, job)`,
`costs(job)`. While an experiment is open, its file can import its neighbours, and what its
functions raise becomes one SimulationError that gives file and line.
"""

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial, update_wrapper
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

from titanlite.tools.simulate.costs import Costs
from titanlite.tools.simulate.network import Network
from titanlite.tools.simulate.priority import PRIORITIES, Lexicographic
from titanlite.tools.simulate.work import SimulationError


class JobSizes(NamedTuple):
    """The sizes of the job that an experiment is run with."""

    workers: int
    stages: int
    batches: int


# The parameters of each function, before the job.
PARAMETERS = {
    "strategy": ("work",),
    "order": ("worker",),
    "priority": ("work",),
    "max_in_flight": ("worker",),
    "needs": ("work",),
    "costs": (),
    "network": (),
}


@contextlib.contextmanager
def open_experiment(path: str, function: str, job: JobSizes) -> Iterator[dict[str, Any]]:
    """Load a strategy file; yield what it defines by the names in PARAMETERS, made for `job`.

    `function` is the name of its strategy. `order` and `strategy` are functions; `costs` is a
    Costs, `network` a Network; `priority` and `max_in_flight` are as `simulate` takes them. Raises
    SimulationError, in one line with file and line, for whatever the file raises or gets wrong,
    until the context is closed.
    """
    if not Path(path).is_file():
        raise SimulationError(f"{path}: there is no such file")
    folder = Path(path).resolve().parent
    with _telling_where(path, folder), _importing_from(folder):
        names = _load(path)
        if not callable(names.get(function)):
            raise SimulationError(
                f"{path}: there is no function {function!r}; define {function}(work) -> "
                "ComputeAndWeightWorkers, or name another function as file.py:name"
            )
        given = {name: names[name] for name in PARAMETERS if names.get(name) is not None}
        given["strategy"] = names[function]
        yield {name: _make(path, name, value, job) for name, value in given.items()}


def _load(path: str) -> dict[str, Any]:
    """The names that the file defines. No bytecode is written for it."""
    source = Path(path).read_bytes()
    code: CodeType = compile(source, path, "exec", dont_inherit=True)
    module = ModuleType("titanlite_experiment")
    module.__file__ = path
    # Dataclasses look for the module of their class while it is made.
    sys.modules[module.__name__] = module
    try:
        exec(code, vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def _make(path: str, name: str, value: Any, job: JobSizes) -> Any:
    """What `name` of the file stands for: a value, or a function without the job's parameter."""
    if name == "priority":
        if isinstance(value, str) and value in PRIORITIES:
            value = PRIORITIES[value]
        if isinstance(value, type) and issubclass(value, Lexicographic):
            return value(job.stages, job.batches)
        if isinstance(value, Lexicographic):
            return value
    if name in ("costs", "network"):
        kind = Costs if name == "costs" else Network
        if callable(value):
            function = _with_job(path, name, value, job)
            value, again = function(), function()
            if _without_functions(value) != _without_functions(again):
                raise SimulationError(
                    f"{path}: {name} changes its answer when it is called again; it must return "
                    f"the same {kind.__name__} for the same job"
                )
        if not isinstance(value, kind):
            raise SimulationError(
                f"{path}: {name} is {value!r}; it must be a {kind.__name__}, or a function of the "
                "job that returns one"
            )
        return value
    if callable(value):
        return _with_job(path, name, value, job)
    if name == "max_in_flight":
        return value
    raise SimulationError(f"{path}: {name} is {value!r}; it must be a function")


def _without_functions(value: Any) -> Any:
    """The fields of a dataclass that can be compared: each call makes its functions anew."""
    if not is_dataclass(value):
        return value
    given = ((field.name, getattr(value, field.name)) for field in fields(value))
    return {name: one for name, one in given if not callable(one)}


def _with_job(
    path: str, name: str, function: Callable[..., Any], job: JobSizes
) -> Callable[..., Any]:
    """`function` of the parameters it must have; a further one without a default gets the job."""
    wanted = PARAMETERS[name]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C do not tell
        return function
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = [p for p in parameters if p.kind == p.VAR_POSITIONAL]
    needed = [p for p in places if p.default is p.empty]
    keywords = [p for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]
    if not keywords and len(needed) == len(wanted) + 1:
        with_job: Callable[..., Any] = partial(function, **{needed[-1].name: job})
        if needed[-1].kind == needed[-1].POSITIONAL_ONLY:
            with_job = lambda *arguments: function(*arguments, job)
        # The title of a picture has the function's name.
        return update_wrapper(with_job, function)
    if keywords or len(needed) > len(wanted) or (len(places) < len(wanted) and not taken):
        takes = ", ".join(p.name for p in (*needed, *keywords))
        forms = [", ".join(wanted), ", ".join((*wanted, "job"))]
        raise SimulationError(
            f"{path}: {name} takes ({takes}); it must take ({forms[0]}) or ({forms[1]})"
        )
    return function


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Modules of `folder` can be imported inside; afterwards others may have their names."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and _is_below(folder, file):
                del sys.modules[name]


@contextlib.contextmanager
def _telling_where(path: str, folder: Path) -> Iterator[None]:
    """Turn what the file raises into a SimulationError that ends with its file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        place = _place(error.__cause__ if isinstance(error, SimulationError) else error, folder)
        text = " ".join(str(error).split())
        if isinstance(error, SimulationError):
            said = text
        elif isinstance(error, SystemExit):
            said = f"{path}: calls sys.exit, which would end the simulation; leave it out"
        else:
            if isinstance(error, SyntaxError):
                line = (error.text or "").strip()
                place = f"{error.filename}:{error.lineno}: {line}" if line else str(error.filename)
                text = error.msg
            said = f"{path}: raises {type(error).__name__}: {text}"
        if place is None:
            raise
        raise SimulationError(f"{said} ({place})") from error


def _place(error: BaseException | None, folder: Path) -> str | None:
    """The innermost line of a file of `folder` that an exception came through: `f.py:3: code`."""
    trace: TracebackType | None = error.__traceback__ if error is not None else None
    for frame in reversed(traceback.extract_tb(trace)):
        if _is_below(folder, frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}".rstrip(": ")
    return None


def _is_below(folder: Path, file: str) -> bool:
    """Whether `file` is the experiment's own: below its folder, and no library's."""
    path = Path(file).resolve()
    is_other = _TITANLITE in path.parents or "site-packages" in path.parts
    return folder in path.parents and path.is_file() and not is_other


_TITANLITE = Path(__file__).resolve().parents[1]
