"""The specs of the image data sets, and which models can read them. No torch.

A pixel value is a token: an image is a sequence of height x width x channels tokens, planar
(channel -> row -> column), each in [0, vocab_size). An image model has `image_height`,
`image_width` and `image_channels` in its configuration; any other model reads the pixels as a
plain sequence.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titanlite.data.spec import Dataset, DatasetSpec, Misfit

SIDES = ("image_height", "image_width", "image_channels")


def _vocabulary(model: Any) -> int:
    """The vocabulary of a model; 256, a byte per pixel, if its configuration does not give it."""
    return getattr(model, "vocab_size", None) or 256


@dataclass(frozen=True)
class ImageSpec(DatasetSpec):
    """An image data set with the shape of its images; None means any size (synthetic).

    A data set of crops supports any height and width up to `max_height` and `max_width`.
    """

    height: int | None = None
    width: int | None = None
    channels: int | None = None
    max_height: int | None = None
    max_width: int | None = None
    sample_name: str = "image"
    token_name: str = "pixel"
    bits_name: str = "dim"
    samples_file: str = "samples.png"
    show: str | Callable[..., None] = "titanlite.data.images.picture:save_samples"
    least_sizes: Mapping[str, int] = field(
        default_factory=lambda: {"image_height": 8, "image_width": 8}
    )

    def shape(self, model: Any, seq_len: int | None = None) -> tuple[int, int, int] | None:
        """Height, width and channels of the model, or else of the data set.

        If neither has a shape, one row of `seq_len` pixels; None if `seq_len` is None too.
        """
        row = None if seq_len is None else (1, seq_len, 1)
        return shape_of(model) or self._own_shape or row

    def seq_len(self, model: Any) -> int | None:
        shape = self.shape(model)
        return None if shape is None else math.prod(shape)

    def misfit(self, model: Any, seq_len: int) -> Misfit | None:
        taken = shape_of(model)
        is_known = taken is not None or self._own_shape is not None
        changes = self._changes(model, seq_len) if is_known else []
        if is_known and not changes:
            return None
        if not is_known and self.max_height is None:
            return None
        values = self.vocab_size or _vocabulary(model)
        takes = " x ".join(map(str, taken)) if taken else f"{seq_len} tokens"
        return Misfit(
            f"images of {self.size} and {values} values",
            f"{takes} and {_vocabulary(model)}",
            tuple(changes),
        )

    def _changes(self, model: Any, seq_len: int) -> list[str]:
        """What must change for the model to read these images."""
        shape = self.shape(model, seq_len)
        assert shape is not None
        needed = (self.height, self.width, self.channels)
        changes = [
            f"model.{name} to {size}"
            for name, size, own in zip(SIDES, needed, shape, strict=True)
            if size not in (None, own)
        ]
        limits = zip(SIDES, (self.max_height, self.max_width, None), shape, strict=True)
        changes += [
            f"model.{name} to at most {most}" for name, most, own in limits if most and own > most
        ]
        if shape_of(model) is None and math.prod(shape) != seq_len:
            is_given = getattr(model, "seq_len", None) is None
            what = "training.seq_len" if is_given else "the sequence length of the model"
            changes.append(f"{what} to {math.prod(shape)}")
        if self.vocab_size is not None and _vocabulary(model) < self.vocab_size:
            changes.append(f"model.vocab_size to {self.vocab_size}")
        return changes

    @property
    def _own_shape(self) -> tuple[int, int, int] | None:
        """The fixed shape of the images; None for crops and generated images."""
        if self.height is None or self.width is None or self.channels is None:
            return None
        return self.height, self.width, self.channels

    def make(self, *, model: Any, seq_len: int, **arguments: Any) -> Dataset:
        shape = self.shape(model, seq_len)
        assert shape is not None
        sizes = dict(zip(("height", "width", "channels"), shape, strict=True))
        return self.builder(**sizes, vocab_size=_vocabulary(model), **arguments)

    @property
    def size(self) -> str:
        """The shape of the images as text: height x width x channels."""
        height = self.height or f"at most {self.max_height}"
        width = self.width or f"at most {self.max_width}"
        return f"{height} x {width} x {self.channels}"


def shape_of(model: Any) -> tuple[int, int, int] | None:
    """Height, width and channels in a model's configuration; None if it is not an image model."""
    height, width, channels = (getattr(model, side, None) for side in SIDES)
    if height is None or width is None or channels is None:
        return None
    return height, width, channels


DIGITS = ImageSpec(
    "digits",
    "1,797 handwritten digits bundled with scikit-learn",
    "titanlite.data.images.digits:build_digits",
    height=8,
    width=8,
    channels=1,
    vocab_size=17,
)
PHOTOS = ImageSpec(
    "photos",
    "random crops of the two photographs bundled with scikit-learn",
    "titanlite.data.images.photos:build_photos",
    channels=3,
    vocab_size=256,
    max_height=427,
    # The validation regions are this wide.
    max_width=64,
)
CIFAR10 = ImageSpec(
    "cifar10",
    "CIFAR-10 from a local folder of its python or binary files",
    "titanlite.data.images.cifar10:build_cifar10",
    height=32,
    width=32,
    channels=3,
    vocab_size=256,
    needs_path=True,
)
SYNTHETIC = ImageSpec(
    "synthetic",
    "generated patterns of any shape and vocabulary, for tests",
    "titanlite.data.images.synthetic:build_synthetic",
)
IMAGES = (DIGITS, PHOTOS, CIFAR10, SYNTHETIC)
