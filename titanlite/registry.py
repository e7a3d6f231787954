"""What a job can name: models, data sets, losses, metrics, ..., each in a Registry. No torch.

register.py has the functions that enter what is a user's own, and imports what is built in.
"""

import importlib
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar


def load(path: Any) -> Any:
    """The object that "module:attribute" names; any other object is returned as it is."""
    if not isinstance(path, str):
        return path
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


REGISTER = "titanlite.register"

S = TypeVar("S", bound=Any)


class Registry(dict[str, S]):
    """Specs by name, each with a field `name`.

    `home` is the module that registers what is built in, which sets it.
    `registered_by` has the modules whose import registered a name: the one that called, and those
    whose import led there.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.home = kind, ""
        self.registered_by: dict[str, set[str]] = {}

    def add(self, spec: S) -> None:
        """Register `spec` as `spec.name`.

        Raises ValueError if a different spec has that name, unless a script or a notebook has
        registered both: a cell may run again.
        """
        registrar, *others = self._registering_modules()
        if registrar == "__main__" and self.registered_by.get(spec.name) == {registrar}:
            self[spec.name] = spec
        elif self.setdefault(spec.name, spec) != spec:
            raise ValueError(f"a different {self.kind} named {spec.name!r} is already registered")
        self.registered_by.setdefault(spec.name, set()).update((registrar, *others))

    def is_built_in(self, name: str) -> bool:
        """Whether only titanlite registered `name`."""
        return self.registered_by.get(name) == {self.home}

    def _registering_modules(self) -> list[str]:
        calls = (
            (frame.f_globals.get("__name__", ""), frame.f_code.co_name == "<module>")
            for frame, _ in traceback.walk_stack(sys._getframe(1))
        )
        # Not the functions that register.
        inner = {(name, False) for name in (__name__, REGISTER)}
        outer = list(itertools.dropwhile(lambda call: call in inner, calls))
        registrar = outer[0][0]
        if registrar == self.home:
            return [registrar]  # what imports the built-in ones registers nothing
        return [registrar, *(name for name, is_import in outer if is_import)]


@dataclass(frozen=True)
class LossSpec:
    """A registered loss: functions, or "module:attribute" of each."""

    name: str
    total: str | Callable[..., Any]
    count: str | Callable[..., Any] | None
    over: Literal["samples", "batch"] = "samples"


@dataclass(frozen=True)
class FunctionSpec:
    """A registered metric, optimizer or scheduler: a function, or its "module:attribute"."""

    name: str
    function: str | Callable[..., Any]

    def load(self) -> Any:
        """The function; imports torch."""
        return load(self.function)


MODELS: Registry[Any] = Registry("model")
"""The models, which model.name can name; ModelSpec (models/spec.py)."""

DATASETS: Registry[Any] = Registry("data set")
"""The data sets, which training.dataset can name; DatasetSpec (data/spec.py)."""

LOSSES: Registry[LossSpec] = Registry("loss")
"""The registered losses, which training.loss can name."""

METRICS: Registry[FunctionSpec] = Registry("metric")
"""The metrics, which validation.metrics can name."""

OPTIMIZERS: Registry[FunctionSpec] = Registry("optimizer")
"""The optimizers, which optimizer.name can name."""

SCHEDULERS: Registry[FunctionSpec] = Registry("scheduler")
"""The learning-rate schedules, which lr_scheduler.decay_type can name."""

REGISTRIES: dict[str, Registry[Any]] = {
    one.kind: one for one in (MODELS, DATASETS, LOSSES, METRICS, OPTIMIZERS, SCHEDULERS)
}


def is_over_batch(name: str | None) -> bool:
    """Whether the registered loss of that name is over the whole batch."""
    return name is not None and name in LOSSES and LOSSES[name].over == "batch"


Specs = list[tuple[str, Any]]
"""Registered specs with their kinds, such as "model"."""

_sent: set[tuple[str, str]] = set()


def registers_something(module: str) -> bool:
    """Whether `module`, or a module of that package, has registered anything."""
    return any(
        _is_by(module, by)
        for registry in REGISTRIES.values()
        for name, by in registry.registered_by.items()
        if name in registry
    )


def specs_to_send(used: Mapping[str, Iterable[str | None]], custom_import: str) -> Specs:
    """The specs that a rank cannot import: those that the calling script has registered.

    `used` has the names that a job uses, by kind. Specs of titanlite and of `custom_import` are
    left out.
    """
    found = []
    for kind, names in used.items():
        registry = REGISTRIES[kind]
        for name in names:
            if name is None or name not in registry:
                continue
            by = registry.registered_by.get(name, set())
            if registry.home not in by and not (custom_import and _is_by(custom_import, by)):
                found.append((kind, registry[name]))
    return found


def take_sent(specs: Specs) -> None:
    """Register specs that were sent, unless this process has its own of that name."""
    for kind, spec in specs:
        registry = REGISTRIES[kind]
        if spec.name not in registry or (kind, spec.name) in _sent:
            registry[spec.name] = spec
            _sent.add((kind, spec.name))


def _is_by(module: str, by: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for name in by)
