"""The data sets by name. Needs no torch, so errors in a job are found before anything starts."""

from __future__ import annotations

from titanlite import models
from titanlite.data.images.spec import CIFAR10, DIGITS, PHOTOS, SYNTHETIC
from titanlite.data.spec import DatasetSpec
from titanlite.data.text.spec import (
    C4,
    C4_TEST,
    C4_VALIDATION,
    HF,
    HF_VALIDATION,
    PYDOC,
    TEXT,
    TOKENS,
)

DATASETS: dict[str, DatasetSpec] = {}
"""All data sets that a job can use, by name."""

REGISTERED_BY: dict[str, set[str]] = {}
"""Name of a data set -> the modules whose import registered it."""


def register(spec: DatasetSpec) -> None:
    """Register a data set as `spec.name`. Raises ValueError if a different one has that name."""
    models.enter(spec, DATASETS, REGISTERED_BY, "data set")


IMAGES = (DIGITS, PHOTOS, CIFAR10, SYNTHETIC)
TEXTS = (PYDOC, TEXT, TOKENS, HF, HF_VALIDATION, C4, C4_TEST, C4_VALIDATION)

for built_in in (*IMAGES, *TEXTS):
    DATASETS[built_in.name] = built_in
    REGISTERED_BY[built_in.name] = {__name__}
