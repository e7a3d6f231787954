"""The two pictures a run ends with: its loss curve, and sampled images beside real ones.

Drawn through matplotlib's objects alone: pyplot would keep global state and look for a screen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from titanlite.observe.metrics import StepRecord

_TRAIN, _VALIDATION, _REFERENCE = "#1f5fa8", "#d1495b", "#6b7280"
_DPI = 144
# Of an image grid, in pixels: the longer side of an image about this, white around and between.
_IMAGE_PIXELS, _MARGIN, _PANEL_GAP = 96, 28, 40
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


def save_image_grid(
    path: str | Path,
    sampled: torch.Tensor,
    real: torch.Tensor,
    *,
    height: int,
    width: int,
    channels: int,
    vocab_size: int,
    title: str = "",
) -> None:
    """Draw sampled images beside real ones as a PNG, each pixel a square block.

    `sampled` [N, T] and `real` [M, T] are int64 tokens, planar, T = channels * height * width.
    One channel is drawn gray and three as RGB; of any other number the planes stand side by side.
    Raises ValueError for another T or for no images.
    """
    panels = [
        (name, _to_pixels(tokens, height, width, channels, vocab_size))
        for name, tokens in (("sampled", sampled), ("real", real))
    ]
    columns = max(math.ceil(math.sqrt(len(images))) for _, images in panels)
    longest_side = max(panels[0][1].shape[1:3])
    scale = max(1, _IMAGE_PIXELS // longest_side)
    mosaics = [_mosaic(images, columns, scale) for _, images in panels]
    figure = Figure(dpi=100)
    FigureCanvasAgg(figure)
    headings = [figure.text(0, 0, f"{name} ({len(images)})") for name, images in panels]
    heading = figure.text(0, 0, title, fontsize=13, parse_math=False)
    widths = [
        max(mosaic.shape[1], math.ceil(text.get_window_extent().width))
        for mosaic, text in zip(mosaics, headings, strict=True)
    ]
    content = max(sum(widths) + _PANEL_GAP, math.ceil(heading.get_window_extent().width))
    head = 96 if title else 56
    width_px = 2 * _MARGIN + content
    height_px = head + max(mosaic.shape[0] for mosaic in mosaics) + _MARGIN
    figure.set_size_inches(width_px / 100, height_px / 100)
    heading.set_position((_MARGIN / width_px, 1 - 44 / height_px))
    left, top = _MARGIN, height_px - head
    for mosaic, text, panel_width in zip(mosaics, headings, widths, strict=True):
        # figimage puts array pixels on picture pixels, so no block is blurred or uneven.
        figure.figimage(mosaic, xo=left, yo=top - mosaic.shape[0], origin="upper")
        text.set_position((left / width_px, (top + 12) / height_px))
        left += panel_width + _PANEL_GAP
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


def _to_pixels(
    tokens: torch.Tensor, height: int, width: int, channels: int, vocab_size: int
) -> np.ndarray:
    """Tokens [N, T] as uint8 [N, height, width, 3]; brightness is token / (vocab_size - 1)."""
    num_pixels = channels * height * width
    if tokens.ndim != 2 or tokens.shape[1] != num_pixels or len(tokens) == 0:
        raise ValueError(f"tokens have shape {list(tokens.shape)}, not [N >= 1, {num_pixels}]")
    planes = tokens.detach().cpu().numpy().reshape(-1, channels, height, width)
    shades = (planes * 255 // max(vocab_size - 1, 1)).clip(0, 255).astype(np.uint8)
    if channels == 3:
        return shades.transpose(0, 2, 3, 1)
    side_by_side = shades.transpose(0, 2, 1, 3).reshape(len(shades), height, channels * width)
    return np.repeat(side_by_side[..., None], 3, axis=-1)


def _mosaic(images: np.ndarray, columns: int, scale: int, gap: int = 6) -> np.ndarray:
    """Images [N, H, W, 3] on a white sheet, `columns` a row, each pixel scale x scale."""
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    count, height, width, _ = images.shape
    rows = math.ceil(count / columns)
    sheet = np.full(
        (rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, dtype=np.uint8
    )
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image
    return sheet
