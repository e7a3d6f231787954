"""The load of experts over a run as a PNG: for each layer, expert by step.

It uses matplotlib's objects without pyplot, which keeps global state and looks for a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from titanlite.observe.metrics import StepRecord

# Of more steps, each column is the mean of several.
_MOST_COLUMNS = 400
_MOST_LAYERS = 16


def save_expert_loads(path: str | Path, records: Sequence[StepRecord]) -> None:
    """Draw each expert's load by step, for each layer: 1 is the mean over the layer's experts.

    At most 16 layers are drawn, evenly spaced. Raises ValueError if no record has counts.
    """
    counted = [record for record in records if record.expert_counts]
    if not counted:
        raise ValueError("there are no counts of experts to draw")
    layers = list(counted[-1].expert_counts)
    places = np.linspace(0, len(layers) - 1, min(len(layers), _MOST_LAYERS)).round().astype(int)
    layers = [layers[place] for place in places]
    figure = Figure(figsize=(8, 1.2 + 1.1 * len(layers)), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    first, last = counted[0].step, counted[-1].step
    image = None
    for axes, layer in zip(grid, layers, strict=True):
        loads = _loads([record.expert_counts[layer] for record in counted])
        image = axes.imshow(
            loads,
            aspect="auto",
            interpolation="nearest",
            origin="lower",
            cmap="RdBu_r",
            norm=TwoSlopeNorm(1.0, 0.0, 2.0),
            extent=(first - 0.5, last + 0.5, -0.5, len(loads) - 0.5),
        )
        axes.set_ylabel(layer.removesuffix(".moe"), fontsize=8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=7)
    grid[-1].set_xlabel("step")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    assert image is not None
    bar = figure.colorbar(image, ax=list(grid), extend="max")
    bar.set_label("tokens of an expert / mean of its layer")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white")


def _loads(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """[experts, columns]: the load relative to the layer's mean."""
    found = np.array(counts, dtype=float)
    found /= np.maximum(found.mean(axis=1, keepdims=True), 1e-12)
    parts = np.array_split(found, min(len(found), _MOST_COLUMNS))
    return np.stack([part.mean(axis=0) for part in parts], axis=1)
