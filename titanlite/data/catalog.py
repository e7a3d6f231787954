"""The data sets by name and what a model must look like to read them; torch-free.

A pixel is a token: an image of height x width x channels is a sequence of that many tokens,
planar (channel -> row -> column), each in [0, vocab_size).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetInfo:
    """Shape and vocabulary of one data set; None where it takes any (synthetic).

    A set of crops takes any height and width up to `max_height` and `max_width`.
    """

    description: str
    height: int | None = None
    width: int | None = None
    channels: int | None = None
    vocab_size: int | None = None
    max_height: int | None = None
    max_width: int | None = None
    needs_path: bool = False

    @property
    def size(self) -> str:
        """Height x width x channels in words, such as "8 x 8 x 1"."""
        height = self.height or f"at most {self.max_height}"
        width = self.width or f"at most {self.max_width}"
        return f"{height} x {width} x {self.channels}"


CATALOG = {
    "digits": DatasetInfo("1,797 handwritten digits bundled with scikit-learn", 8, 8, 1, 17),
    "photos": DatasetInfo(
        "random crops of the two photographs bundled with scikit-learn",
        channels=3,
        vocab_size=256,
        max_height=427,
        # What is held out for validation is no wider.
        max_width=64,
    ),
    "cifar10": DatasetInfo(
        "CIFAR-10 from a local folder of its python or binary files",
        32,
        32,
        3,
        256,
        needs_path=True,
    ),
    "synthetic": DatasetInfo("generated patterns of any shape and vocabulary, for tests"),
}
