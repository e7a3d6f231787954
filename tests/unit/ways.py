"""The way of a reader through the code: which files a call leads through, and how often it returns.

A profiler notes each function of titanlite at its first call, and who called it. The way of a call
is what a reader follows: the functions that call into another file, in the order of their first
calls. Functions that end where they are, such as a degree or a name, are looked up, not read.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
Function = tuple[str, str]
"""A file, from the root of the repository, and a name in it."""


@dataclass
class Way:
    """The functions of titanlite that ran, in the order of their first calls."""

    functions: list[Function] = field(default_factory=list)
    calls: dict[Function, set[Function]] = field(default_factory=dict)
    """Caller -> the functions that it called."""

    def files(self, *, inside: str = "", to: tuple[str, ...] = ()) -> list[str]:
        """The files in the order in which they are entered; a file appears again at each return.

        With `inside`, only those of a folder. With `to`, only functions on the way to those whose
        names begin so.
        """
        leading = self._leading(to) if to else set(self.calls)
        carrying = {
            by for by in leading if any(called[0] != by[0] for called in self.calls.get(by, ()))
        } | {one for one in leading if to and one[1].startswith(to)}
        files = [f for f, name in self.functions if (f, name) in carrying and f.startswith(inside)]
        return [file for file, _ in groupby(files)]

    def _leading(self, to: tuple[str, ...]) -> set[Function]:
        found = {one for one in self.functions if one[1].startswith(to)}
        size = 0
        while size < len(found):
            size = len(found)
            found |= {by for by, called in self.calls.items() if called & found}
        return found


@contextmanager
def recorded() -> Iterator[Way]:
    """Inside, the functions of titanlite that run in this thread are recorded."""
    way = Way()
    seen: set[Function] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (function := _function(frame.f_code)) is None:
            return
        caller = frame.f_back
        while caller is not None and (by := _function(caller.f_code)) is None:
            caller = caller.f_back
        if caller is not None and by is not None:
            way.calls.setdefault(by, set()).add(function)
        if function not in seen:
            seen.add(function)
            way.functions.append(function)

    sys.setprofile(note)
    try:
        yield way
    finally:
        sys.setprofile(None)


@functools.cache
def _function(code: CodeType) -> Function | None:
    """The function that this code is of or in; None for code of others, and for modules."""
    path = Path(code.co_filename)
    if code.co_name == "<module>" or not path.is_relative_to(ROOT / "titanlite"):
        return None
    name = getattr(code, "co_qualname", code.co_name).partition(".<locals>")[0]
    return path.relative_to(ROOT).as_posix(), name
