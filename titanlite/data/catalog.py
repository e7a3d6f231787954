"""The data sets by name. Needs no torch, so errors in a job are found before anything starts."""

from titanlite.data.images.spec import IMAGES
from titanlite.data.text.spec import TEXTS
from titanlite.registry import DATASETS

DATASETS.home = __name__
for built_in in (*IMAGES, *TEXTS):
    DATASETS.add(built_in)
