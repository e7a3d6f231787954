"""A data set of sequences that hold several documents, registered by custom_import."""

from titanlite import register_dataset

register_dataset(
    "packed_documents",
    "packed_documents.data:build",
    description="random tokens in documents of random lengths, one after the other",
    fields={"positions": 0, "documents": 0},
)
