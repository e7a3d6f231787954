"""Draw sampled images next to real ones, as a PNG.

Uses matplotlib without pyplot, which would keep global state and look for a display.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from titanlite.data.images.spec import shape_of

# In pixels: the approximate longer side of an image, the outer margin, the gaps between images and
# between panels.
_IMAGE_PIXELS, _MARGIN, _IMAGE_GAP, _PANEL_GAP = 96, 28, 6, 40


def save_samples(
    path: Path, sampled: torch.Tensor, real: torch.Tensor, *, model: Any, title: str
) -> None:
    """Draw sampled images next to real ones as a PNG, each pixel as a square block.

    `sampled` [N, T] and `real` [M, T] are int64 tokens, planar, T = channels * height * width for a
    model with the configuration `model`. One channel is drawn in gray and three as RGB; for any
    other number, the planes are drawn side by side. Raises ValueError for another T or for no
    images.
    """
    height, width, channels = shape_of(model) or (1, sampled.size(1), 1)
    panels = [
        (name, _to_pixels(tokens, height, width, channels, model.vocab_size))
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
        # figimage maps array pixels to picture pixels exactly, so no block is blurred or uneven.
        figure.figimage(mosaic, xo=left, yo=top - mosaic.shape[0], origin="upper")
        text.set_position((left / width_px, (top + 12) / height_px))
        left += panel_width + _PANEL_GAP
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


def _mosaic(images: np.ndarray, columns: int, scale: int) -> np.ndarray:
    """Images [N, H, W, 3] on a white sheet, `columns` per row, each pixel scale x scale."""
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    count, height, width, _ = images.shape
    rows, gap = math.ceil(count / columns), _IMAGE_GAP
    sheet = np.full(
        (rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, dtype=np.uint8
    )
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image
    return sheet
