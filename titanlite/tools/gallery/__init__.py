"""The pictures of a run: what the commands hand to it (titanlite.observe.reporter.Artist).

ending.py             at its end: the loss curve, the load of experts, samples beside real ones
pictures.py           the first two, from plain values
pipeline_timeline.py  the timeline of a pipeline's step: recorded, gathered and drawn
communication.py      what a rank sends and receives in it

This module imports no torch, since a launcher that runs no step imports it.
"""

from titanlite.lazy import lazy
from titanlite.tools.figures.mesh_drawing import draw_mesh as draw_mesh

lazy(__name__, {"ending": ("draw_end",), "pipeline_timeline": ("draw_steps",)})
