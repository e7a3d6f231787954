"""Record: a recorded run that draws itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from titanlite.tools.figures.messages import draw_page, draw_svg
from titanlite.tools.lab.pictures import picture_of
from titanlite.tools.lab.record import Recorded, Steps
from titanlite.tools.lab.steps import make_steps


class Record(Recorded):
    """The events of a run; `steps` arranges them on a clock of equal steps, `svg` and `html` draw.

    `messages` are all messages in the order in which they were sent, `calls` all collectives.
    """

    @cached_property
    def steps(self) -> Steps:
        return make_steps(self)

    def svg(
        self, title: str = "", caption: str = "", rows: Sequence[str] = (), most_steps: int = 0
    ) -> str:
        """The picture of the run: messages as arrows between ranks (`rows`), over steps."""
        return draw_svg(picture_of(self, title, caption, rows=rows), most_steps)

    def html(self, title: str = "", caption: str = "", rows: Sequence[str] = ()) -> str:
        """A self-contained page that steps through the run with the arrow keys."""
        return draw_page(picture_of(self, title, caption, rows=rows))

    def _repr_svg_(self) -> str:
        """The picture, which a notebook shows."""
        return self.svg()
