"""Sizes of the tied model; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from rotary_model.config import RotaryConfig


@dataclass(frozen=True)
class TiedConfig(RotaryConfig):
    """Those of the rotary model."""


FLAVORS = {"small": TiedConfig()}
