"""Exact time: numbers as they were written, and times as whole numbers of ticks.

A sum of floats depends on their unit: 0.1 + 0.2 is not 0.3, so work that is ready at the same time
would not be. Here 0.1 is one tenth. Times become integers over one common denominator before a
simulation runs, and numbers again in its results.
"""

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Integral, Rational, Real
from typing import Any, TypeAlias

from titanlite.tools.simulate.work import SimulationError

Number: TypeAlias = int | float | Fraction | Decimal
Exact: TypeAlias = int | Fraction
Time: TypeAlias = int | float | Fraction

MOST = 10**100
"""The largest number allowed; the smallest above zero is its inverse."""


def exact(value: Any, what: str) -> Exact:
    """`value` as an integer or Fraction: a float is its shortest decimal, 0.1 one tenth.

    Raises SimulationError, which names `what`, for a negative number, NaN, infinity, a number
    above 1e100, one between zero and 1e-100, or what is not a number.
    """
    number: Exact
    try:
        if isinstance(value, bool):
            raise TypeError
        if isinstance(value, Integral):
            number = int(value)
        elif isinstance(value, Rational):
            number = Fraction(value)
        elif isinstance(value, Decimal):
            if value and abs(value.adjusted()) > 200:  # its Fraction could fill the memory
                value = Decimal("1e200" if value.adjusted() > 0 else "1e-200").copy_sign(value)
            number = Fraction(value)
        elif isinstance(value, float):
            number = _shortest_decimal(value)
        elif isinstance(value, Real):
            number = Fraction(str(value))
        else:
            raise TypeError
    except (TypeError, ValueError, OverflowError):  # NaN and infinity are not fractions
        raise SimulationError(f"{what} is {_shown(value)}; it must be a finite number") from None
    if number < 0:
        raise SimulationError(f"{what} is {_shown(value)}; it must not be negative")
    if number and not Fraction(1, MOST) <= number <= MOST:
        raise SimulationError(
            f"{what} is {_shown(value)}; it must be 0 or between 1e-100 and 1e100; use another unit"
        )
    return number.numerator if number.denominator == 1 else number


@lru_cache(maxsize=4096)
def _shortest_decimal(value: float) -> Fraction:
    return Fraction(float.__repr__(value))


def is_fraction(value: Any) -> bool:
    """Whether results of `value` are Fractions: it is a Fraction or a Decimal."""
    return isinstance(value, Decimal) or (
        isinstance(value, Rational) and not isinstance(value, Integral)
    )


def simplest(value: Exact) -> Time:
    """`value` as an integer or float if that says it exactly, else as a Fraction."""
    if value.denominator == 1:
        return value.numerator
    nearest = value.numerator / value.denominator
    return nearest if Fraction(repr(nearest)) == value else value


class Ticks:
    """Whole numbers of ticks; `per_unit` of them make one unit of time."""

    def __init__(self, times: Iterable[Exact], as_fractions: bool = False) -> None:
        """Ticks in which all of `times` are whole; `time` returns Fractions or floats."""
        self.per_unit = math.lcm(*{time.denominator for time in times})
        self.as_fractions = as_fractions

    def ticks(self, time: Exact) -> int:
        """The ticks of a time that is a whole number of them."""
        return time.numerator * (self.per_unit // time.denominator)

    def time(self, ticks: Exact) -> Time:
        """An integer if the time is one; else a Fraction or the nearest float."""
        top, bottom = ticks.numerator, ticks.denominator * self.per_unit
        if top % bottom == 0:
            return top // bottom
        return Fraction(top, bottom) if self.as_fractions else top / bottom


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of too many digits, or a value whose repr raises
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
