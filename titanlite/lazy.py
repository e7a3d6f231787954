"""Names of a package that are imported from their modules when they are first used.

    lazy(__name__, {"step": ("Trainer", "StepResult")})

So `import titanlite` is fast and does not import torch. Under `if TYPE_CHECKING`, the package
imports the same names for type checkers and editors. These would take any name of a package in
whose source they find a `__getattr__`.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def lazy(
    package: str, homes: Mapping[str, tuple[str, ...]], subpackages: tuple[str, ...] = ()
) -> None:
    """Give `package` an `__all__`, `__getattr__` and `__dir__` of `homes`, module -> names.

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

    vars(sys.modules[package]).update(__all__=[*module_of], __getattr__=get, __dir__=names)
