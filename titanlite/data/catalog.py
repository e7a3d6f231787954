"""The data sets by name. Needs no torch, so errors in a job are found before anything starts."""

from titanlite.data.images.spec import CIFAR10, DIGITS, PHOTOS, SYNTHETIC
from titanlite.data.text.spec import (
    C4,
    C4_TEST,
    C4_VALIDATION,
    CHAT,
    HF,
    HF_VALIDATION,
    PYDOC,
    TEXT,
    TOKENS,
)
from titanlite.registry import DATASETS

DATASETS.home = __name__
IMAGES = (DIGITS, PHOTOS, CIFAR10, SYNTHETIC)
TEXTS = (PYDOC, TEXT, CHAT, TOKENS, HF, HF_VALIDATION, C4, C4_TEST, C4_VALIDATION)

for built_in in (*IMAGES, *TEXTS):
    DATASETS.add(built_in)
