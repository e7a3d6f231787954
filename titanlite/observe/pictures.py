"""The picture of a run that any job has: its loss curve.

Drawn through matplotlib's objects alone: pyplot would keep global state and look for a screen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from titanlite.observe.metrics import StepRecord

_TRAIN, _VALIDATION, _REFERENCE = "#1f5fa8", "#d1495b", "#6b7280"
_DPI = 144
# Curves of more steps than this are drawn faint, with their running mean over them.
_STEPS_A_WINDOW = 60


def save_loss_curve(
    path: str | Path,
    records: Sequence[StepRecord],
    *,
    vocab_size: int | None = None,
    title: str = "",
) -> None:
    """Draw the loss by step as a PNG, 1,152 x 720 pixels.

    Training loss, validation loss where measured, and, with `vocab_size`, the loss ln(vocab_size)
    of a model that has learned nothing; the right-hand axis is the same in bits per dimension.
    Steps whose loss is not finite are left out. Raises ValueError where there are no records.
    """
    if not records:
        raise ValueError("there are no records to draw")
    figure = Figure(figsize=(8, 5), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
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
    if vocab_size is not None:
        axes.axhline(
            math.log(vocab_size),
            color=_REFERENCE,
            linewidth=1.2,
            linestyle=(0, (4, 3)),
            label=f"ln({vocab_size}) = {math.log(vocab_size):.3f}, nothing learned",
        )
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("loss (nats a token)")
    bits = axes.secondary_yaxis("right", functions=(_nats_to_bits, _bits_to_nats))
    bits.set_ylabel("bits per dimension")
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.margins(x=0.02)
    # Above the plot, where no curve can be under it.
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
    if title:
        # As it is: what stands between two dollars is no formula.
        axes.set_title(title, loc="left", fontsize=12, pad=28, parse_math=False)
    _save(figure, path)


# matplotlib hands these arrays, and empty ones too.
def _nats_to_bits(nats: Any) -> Any:
    return nats / math.log(2)


def _bits_to_nats(bits: Any) -> Any:
    return bits * math.log(2)


def _save(figure: Figure, path: str | Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", facecolor="white")
