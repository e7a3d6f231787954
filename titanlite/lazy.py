"""Names of a package that are imported from their modules when they are first used.

    __getattr__, __dir__ = lazy(__name__, {"step": ("Trainer", "StepResult")})

So `import titanlite` is fast and does not import torch. Under `if TYPE_CHECKING`, the package
imports the same names for type checkers and editors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(
    package: str, homes: Mapping[str, tuple[str, ...]], subpackages: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, which has the names `homes`, module -> names.

    `subpackages` are imported at their first use, too.
    """
    module_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in module_of:
            return getattr(import_module(f"{package}.{module_of[name]}"), name)
        if name in subpackages:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *subpackages})

    return get, names
