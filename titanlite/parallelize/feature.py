"""What a feature tells of itself without torch: to the configuration, to a run, and to `verify`.

Each folder here has a spec.py with a Feature, and most have a step.py, which applies the feature to
a model. steps.py lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titanlite.fields import Check, Section

if TYPE_CHECKING:
    from titanlite.config.schema import JobConfig


@dataclass(frozen=True)
class Variation:
    """Something that `verify --matrix` varies."""

    name: str
    values: Mapping[str, Mapping[str, Any]]
    """Each value, and the keys of a job that it sets: {"on": {"section.key": True}, "off": {}}."""
    needs: tuple[str, ...] = ()
    """It applies only if one of these mesh axes has several ranks."""
    value_needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same for single values."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the matrix's small model with which any value but the first has an effect."""
    on_request: bool = False
    """Whether it is varied only if that is asked for, since it is slow."""

    @staticmethod
    def of_key(name: str, key: str, values: Iterable[str], needs: tuple[str, ...]) -> Variation:
        """The values of one key."""
        return Variation(name, {value: {key: value} for value in values}, needs)


@dataclass(frozen=True)
class Feature:
    """A parallel feature of a job."""

    name: str
    """As in the effective plan: "float8"."""
    folder: str
    """Of titanlite/parallelize."""
    is_on: Callable[[JobConfig], bool]
    """Whether a job asks for it."""
    sections: Mapping[str, type[Section]] = field(default_factory=dict)
    """Sections of its own: full name -> class."""
    converter: str | None = None
    """The value of model.converters that asks for it."""
    checks: tuple[Check, ...] = ()
    """Of keys against each other."""
    machine_problems: Callable[[JobConfig, str], Iterator[str]] = lambda *_: iter(())
    """What this machine lacks for it on a type of device, as lines for the user."""
    variations: tuple[Variation, ...] = ()
    """Its part of `verify --matrix`."""
    off: Mapping[str, Any] = field(default_factory=dict)
    """The keys that switch it off; empty if the mesh decides that, and for a way to use an axis."""
    changes_numbers: bool = False
    """Whether it changes which numbers are computed, so that one process does the same."""
    depends_on_microbatch: bool = False
    """Whether the numbers of a sequence depend on the other sequences of its microbatch."""
    loss_tolerance: float | None = None
    """If set, `verify` compares only losses, unless in float64, and with at least this tolerance:
    for a feature that can turn a rounding error into a jump."""
    checks_model: bool = False
    """Whether its step has `check_model`, which looks at the model before any rank starts."""
