"""The data sets by name; torch-free, so that a mistake in a job is found before anything starts."""

from __future__ import annotations

from titanlite import models
from titanlite.data.images.spec import CIFAR10, DIGITS, PHOTOS, SYNTHETIC
from titanlite.data.spec import DatasetSpec

DATASETS: dict[str, DatasetSpec] = {}
"""Every data set that a job can name."""

REGISTERED_BY: dict[str, set[str]] = {}
"""Name of a data set -> the modules that registered it: those whose import called `register`."""


def register(spec: DatasetSpec) -> None:
    """Makes a data set known under `spec.name`; raises ValueError if another one has that name."""
    if DATASETS.setdefault(spec.name, spec) != spec:
        raise ValueError(f"a data set named {spec.name!r} is registered already")
    REGISTERED_BY.setdefault(spec.name, set()).update(models.registering_modules())


def datasets_of(module: str) -> list[str]:
    """The names of the data sets that `module`, or a module of that package, has registered."""
    return [
        name
        for name, modules in REGISTERED_BY.items()
        if name in DATASETS and any(f"{by}.".startswith(f"{module}.") for by in modules)
    ]


for built_in in (DIGITS, PHOTOS, CIFAR10, SYNTHETIC):
    DATASETS[built_in.name] = built_in
