"""Sizes of the faulty model, and its fault; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from plain_model.config import PlainConfig


@dataclass(frozen=True)
class FaultyConfig(PlainConfig):
    dim: int = 16
    hidden_dim: int = 32
    image_height: int = 4
    image_width: int = 4
    fault: str = ""

    @property
    def num_parameters(self) -> int:
        return 1


FLAVORS = {"small": FaultyConfig()}
