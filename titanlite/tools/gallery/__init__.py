"""The pictures of a run: what the commands hand to it (titanlite.observe.reporter.Artist).

ending.py    at its end: the loss curve, the load of experts, and samples beside real ones; and the
             timeline of a pipeline's step
pictures.py  the first two, from plain values

This module imports no torch, since a launcher that runs no step imports it.
"""

from titanlite.lazy import lazy

lazy(__name__, {"ending": ("draw_end", "draw_timeline")})
