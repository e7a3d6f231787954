"""The loss curve of a run, and the load of its experts, as PNGs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator

from titanlite.tools.figures.chart import COLORS
from titanlite.tools.figures.figure import make_figure, save_figure
from titanlite.tools.figures.palette import GRID

if TYPE_CHECKING:
    from titanlite.observe.metrics import StepRecord

_TRAIN, _VALIDATION, _REFERENCE = *COLORS[:2], "#767676"
# The running mean is over 1/60 of the steps. If that is more than one step, the mean is drawn, and
# the curve itself faintly.
_STEPS_A_WINDOW = 60
# The number of title characters that fit above the axes.
_TITLE_WIDTH = 84
# Of the load of experts: of more steps, each column is the mean of several.
_MOST_COLUMNS = 400
_MOST_LAYERS = 16


def save_loss_curve(
    path: str | Path,
    records: Sequence[StepRecord],
    *,
    vocab_size: int | None = None,
    title: str = "",
    bits_per: str | None = "dim",
) -> None:
    """Draw the loss by step as a PNG, 1,152 x 720 pixels.

    Draws the training loss, the validation loss if measured, and, with `vocab_size`, the loss
    ln(vocab_size) of uniform predictions. The right-hand axis shows bits per `bits_per`; without
    it, the loss is not in nats per token. Steps whose loss is not finite are left out. Raises
    ValueError if there are no records.
    """
    if not records:
        raise ValueError("there are no records to draw")
    figure = make_figure(8, 5, dpi=144)
    axes = figure.add_subplot()
    _draw_training(axes, records)
    _draw_validation(axes, records)
    if vocab_size is not None:
        axes.axhline(
            math.log(vocab_size),
            color=_REFERENCE,
            linewidth=1.2,
            linestyle=(0, (4, 3)),
            label=f"ln({vocab_size}) = {math.log(vocab_size):.3f}, nothing learned",
        )
    _dress(axes, title, bits_per)
    save_figure(figure, path)


def _draw_training(axes: Axes, records: Sequence[StepRecord]) -> None:
    steps = np.array([record.step for record in records])
    losses = np.array([record.loss for record in records])
    losses = np.where(np.isfinite(losses), losses, np.nan)
    window = len(records) // _STEPS_A_WINDOW
    if window > 1:
        axes.plot(steps, losses, color=_TRAIN, linewidth=0.8, alpha=0.35)
        means = np.convolve(losses, np.ones(window) / window, mode="valid")
        first = window // 2
        axes.plot(
            steps[first : first + len(means)],
            means,
            color=_TRAIN,
            linewidth=1.8,
            label=f"training (mean of {window} steps)",
        )
    else:
        marker = "o" if len(records) == 1 else None
        axes.plot(steps, losses, color=_TRAIN, linewidth=1.4, marker=marker, label="training")


def _draw_validation(axes: Axes, records: Sequence[StepRecord]) -> None:
    validated = {r.step: r.validation_loss for r in records if r.validation_loss is not None}
    if validated:
        axes.plot(
            list(validated),
            list(validated.values()),
            color=_VALIDATION,
            linewidth=1.4,
            marker="o",
            markersize=4,
            label="validation",
        )


def _dress(axes: Axes, title: str, bits_per: str | None) -> None:
    """Scales, grid, legend and title around the curves."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if bits_per is None:
        axes.set_ylabel("loss")
    else:
        axes.set_ylabel("loss (nats per token)")
        # matplotlib passes arrays to these functions, also empty ones.
        to_bits = lambda nats: nats / math.log(2), lambda bits: bits * math.log(2)
        bits = axes.secondary_yaxis("right", functions=to_bits)
        bits.set_ylabel(f"bits per {bits_per}")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.margins(x=0.02)
    # Above the plot, so that it covers no curve.
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
    if title:
        title = textwrap.fill(title, _TITLE_WIDTH)
        # Without parse_math=False, text between two dollar signs would become a formula.
        axes.set_title(title, loc="left", fontsize=12, pad=28, parse_math=False)


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
    figure = make_figure(8, 1.2 + 1.1 * len(layers), dpi=144)
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
    save_figure(figure, path)


def _loads(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """[experts, columns]: the load relative to the layer's mean."""
    found = np.array(counts, dtype=float)
    found /= np.maximum(found.mean(axis=1, keepdims=True), 1e-12)
    parts = np.array_split(found, min(len(found), _MOST_COLUMNS))
    return np.stack([part.mean(axis=0) for part in parts], axis=1)
