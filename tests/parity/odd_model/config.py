"""The plain model with one oddity; torch-free."""

from dataclasses import dataclass

from plain_model.config import PlainConfig


@dataclass(frozen=True)
class OddConfig(PlainConfig):
    """`oddity` is what is odd about it."""

    oddity: str = "none"


FLAVORS = {
    name: OddConfig(oddity=name)
    for name in (
        "none",
        *("dropout", "not finite", "called twice", "frozen", "raises"),
        *("batch statistics", "rounds"),
    )
}
