"""The arguments of a comparison: checked, and pickled for the ranks; torch-free."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import cloudpickle

from titanlite import pickles
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import Grid

TRAINED_IN = ("float64", "float32", "bfloat16")

Split = str | Mapping[str, int] | Callable[[Any, Any], Any]
"""An axis that splits dimension 0, axis -> dimension, or a function (batch, mesh) -> part."""


@dataclass(frozen=True)
class Request:
    """What the ranks must know; `titanlite.compare` explains each field."""

    reference: Callable[[], Any]
    parallel: Callable[..., Any]
    batches: Sequence[Any]
    loss: Callable[[Any, Any], Any]
    grid: Grid
    split: Split | None = None
    step: Callable[[Any, Any], Any] | None = None
    reference_step: Callable[[Any, Any], Any] | None = None
    """Like `step`, for a reference with a step of its own; `reference` may return a tuple then.

    Both steps return the loss of the whole batch, on every rank that has one.
    """
    optimizer: Callable[[list[Any]], Any] | None = None
    clip: Callable[[Any], Any] | None = None
    shard: Callable[[str], Any] | None = None
    rename: Callable[[str], str] | Mapping[str, str] | None = None
    copy_weights: bool = False
    leave_out: Sequence[str] = ()
    parallel_loss: Callable[[Any, Any], Any] | None = None
    microbatches: int | None = None
    modules: bool = True
    dtype: str = "float64"
    seed: int | None = 0
    timeout_seconds: float = 300

    def name_of(self, name: str) -> str:
        """The reference's name of a module or parameter of the parallel code."""
        if isinstance(self.rename, Mapping):
            return self.rename.get(name, name)
        return name if self.rename is None else self.rename(name)

    def leaves_out(self, name: str) -> bool:
        """Whether a parameter, buffer or module is not to be compared."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.leave_out)


FUNCTIONS = {
    "reference": (),
    "parallel": ("mesh",),
    "loss": ("model", "batch"),
    "step": ("built", "part"),
    "reference_step": ("built", "batch"),
    "optimizer": ("parameters",),
    "clip": ("model",),
    "shard": ("name",),
    "parallel_loss": ("model", "batch"),
}
"""The functions, and with what they are called."""
REQUIRED = ("reference", "parallel", "loss")


# The functions that build a model.
BUILD = ("reference", "parallel")


def make_grid(ranks: Any) -> Grid:
    """The grid of `ranks`, a number ("world") or axis -> degree; otherwise raises ConfigError."""
    degrees = {"world": ranks} if isinstance(ranks, int) else ranks
    is_mapping = isinstance(degrees, Mapping) and len(degrees) > 0
    if not is_mapping or not all(isinstance(axis, str) and axis for axis in degrees):
        raise ConfigError(f'ranks: {ranks!r} is no number of ranks; give 4 or {{"dp": 2, "tp": 2}}')
    for axis, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ConfigError(f"ranks: {axis} has {degree!r} ranks; give a positive integer")
    return Grid(**degrees)


def check(request: Request) -> None:
    """Raises ConfigError, with all mistakes that can be seen before a process starts."""
    problems = []
    for name in FUNCTIONS:
        value = getattr(request, name)
        if not callable(value) and (value is not None or name in REQUIRED):
            problems.append(f"{name}: {_shown(value)} is not a function; give one")
        elif hasattr(value, "named_parameters") and not isinstance(value, type) and name in BUILD:
            kind = type(value).__name__
            problems.append(f"{name}: {kind} is a model; give a function that builds it")
        else:
            problems += _call_problems(name, value, FUNCTIONS[name])
    if not (request.rename is None or callable(request.rename)) and not isinstance(
        request.rename, Mapping
    ):
        problems.append(f"rename: {_shown(request.rename)} is neither a function nor a mapping")
    if not isinstance(request.batches, Sequence) or isinstance(request.batches, str):
        kind = type(request.batches).__name__
        problems.append(f"batches: a {kind} is not a list; give a list of batches, one per step")
    elif not request.batches:
        problems.append("batches: the list is empty; give one batch per step")
    if request.dtype not in TRAINED_IN:
        problems.append(f"dtype: {request.dtype!r} is not supported; give {', '.join(TRAINED_IN)}")
    patterns = request.leave_out
    if isinstance(patterns, str) or not all(isinstance(one, str) for one in patterns):
        problems.append(f"leave_out: {_shown(patterns)} is no list of names or patterns")
    count = request.microbatches
    if count is not None and not (isinstance(count, int) and count > 0):
        problems.append(f"microbatches: {count!r} is no positive integer")
    if not request.timeout_seconds > 0:
        problems.append(f"timeout_seconds: {request.timeout_seconds} is not positive")
    problems += _split_problems(request)
    if callable(request.split):
        problems += _call_problems("split", request.split, ("batch", "mesh"))
    if callable(request.rename):
        problems += _call_problems("rename", request.rename, ("name",))
    if problems:
        raise ConfigError(*problems)


def _call_problems(name: str, function: Any, given: Sequence[str]) -> Iterator[str]:
    """That a function does not take what it will be called with."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # None, or a function that does not say what it takes.
        return
    for arguments in (given, ()) if name == "parallel" else (given,):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return
    yield f"{name}: takes {signature}; give a function that takes ({', '.join(given)})"


def _split_problems(request: Request) -> Iterator[str]:
    split, axes = request.split, list(request.grid.degrees)
    if split is None or callable(split):
        return
    if isinstance(split, str):
        split = {split: 0}
    if not isinstance(split, Mapping):
        yield f"split: {_shown(split)} is no axis, no mapping of axes and no function"
        return
    for axis, dim in split.items():
        if axis not in axes:
            yield f"split: there is no axis {axis!r}; the axes of `ranks` are {', '.join(axes)}"
        elif not isinstance(dim, int) or dim < 0:
            yield f"split: {dim!r} is no dimension of a batch; give 0 for rows, 1 for tokens"


def pack(request: Request) -> bytes:
    """The request, pickled; raises ConfigError that names the argument that cannot be."""
    # Imports torch, which the caller's functions, now known, have imported.
    from titanlite.tools.verify.program.operators import OperatorPickler

    with _by_value(_modules_of(request)):
        try:
            return pickles.dumps(request, OperatorPickler)
        except Exception:
            for each in fields(request):
                _dump(each.name, getattr(request, each.name), OperatorPickler)
            raise


def _dump(name: str, value: Any, kind: type[pickles.Pickler]) -> None:
    try:
        pickles.dumps(value, kind)
    except Exception as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{name}: cannot be sent to the ranks ({type(error).__name__}: {why}); build what "
            "cannot be pickled, such as locks, files and process groups, inside the function"
        ) from error


def _modules_of(request: Request) -> list[ModuleType]:
    """The modules of the request's functions that a rank could not import by name."""
    found = {}
    for name in (*FUNCTIONS, "rename", "split"):
        module = inspect.getmodule(getattr(request, name))
        if module is not None and module.__name__ != "__main__" and not _is_importable(module):
            found[module.__name__] = module
    return list(found.values())


def _is_importable(module: ModuleType) -> bool:
    """Whether an import by name finds this module: pytest can load a file without that."""
    own = getattr(module, "__file__", None)
    without = sys.modules.pop(module.__name__)
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError, AttributeError):
        spec = None
    finally:
        sys.modules[module.__name__] = without
    return spec is not None and (own is None or spec.origin == own)


@contextlib.contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Inside, functions of these modules are pickled with their code."""
    new = [m for m in modules if m.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
