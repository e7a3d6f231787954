"""A data set of sequences that hold several documents, registered by custom_import."""

from titanlite.data.spec import DatasetSpec
from titanlite.registry import DATASETS

DATASETS.add(
    DatasetSpec(
        "packed_documents",
        "random tokens in documents of random lengths, one after the other",
        build="packed_documents.data:build",
        fields={"positions": 0, "documents": 0},
    )
)
