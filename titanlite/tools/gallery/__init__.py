"""The pictures of a run: what the commands hand to it (titanlite.observe.reporter.Artist).

ending.py    at its end: the loss curve, the load of experts, and samples beside real ones
pictures.py  the first two, from plain values

This module imports no torch, since a launcher that runs no step imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.schedule import Timeline

if TYPE_CHECKING:
    from titanlite.job import Job


def draw_end(
    job: Job, folder: Path, say: Callable[[str], None], is_stopped: Callable[[], bool]
) -> None:
    """Draw the pictures of a run in `folder`; every rank must call this, and rank 0 draws.

    Sampling ends early once `is_stopped` returns True on a rank.
    """
    from titanlite.tools.gallery import ending

    ending.draw_end(job, folder, say, is_stopped)


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Draw the timeline of a pipeline's step as an SVG."""
    from titanlite.tools.figures.schedule_svg import draw_svg

    path.write_text(draw_svg(timeline))
