"""The memory of workers over time, stacked by what fills it, as a PNG or SVG."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from titanlite.tools.figures.figure import make_figure, save_figure

# Weights, gradients, optimizer state, activations, and weights that are fetched.
KINDS_OF_MEMORY = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9")
MOST_PANELS = 8


class MemoryPanel(NamedTuple):
    """One worker: its (time, sizes) corners, with a size for each kind, from 0 to the end."""

    name: str
    corners: Sequence[tuple[float, Sequence[float]]]

    @property
    def peak(self) -> float:
        return max(sum(sizes) for _, sizes in self.corners)


def save_memory(
    path: str | Path,
    panels: Sequence[MemoryPanel],
    kinds: Sequence[str],
    *,
    title: str,
    time_unit: str,
    size_unit: str,
) -> None:
    """Draw the peak of each worker as stacked bars, and below them the workers over time.

    Of more than 8 workers, those over time are 8, in order: the one with the highest peak, and
    others at equal distances. The suffix of `path` is .png or .svg.
    """
    shown = _choose(panels)
    used = [i for i in range(len(kinds)) if any(c[1][i] for p in panels for c in p.corners)]
    rows = -(-len(shown) // 4)
    columns = -(-len(shown) // rows)
    figure = make_figure(8.85, 2.6 + 1.9 * rows)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[2.2, 1.9 * rows]).flat
    top = 1.08 * max(panel.peak for panel in panels) or 1
    bars = above.subplots()
    _draw_peaks(bars, panels, used)
    bars.set_ylim(0, top)
    label = f"memory{size_unit and f', {size_unit}'}"
    bars.set_ylabel(f"peak {label}", fontsize=9)
    below.supylabel(label, fontsize=9)
    grid = below.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, shown, strict=False):
        _draw_over_time(axes, panel, used)
        axes.set_ylim(0, top)
        axes.set_xlim(0, panel.corners[-1][0])
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    below.supxlabel(f"time, {time_unit}", fontsize=9)
    for axes in (bars, *grid.flat):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    patches = [Patch(color=KINDS_OF_MEMORY[i], label=kinds[i]) for i in used]
    bars.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(patches),
        frameon=False,
        fontsize=9,
    )
    bars.set_title(textwrap.fill(title, 96), loc="left", fontsize=10, pad=24, parse_math=False)
    save_figure(figure, path)


def _choose(panels: Sequence[MemoryPanel]) -> list[MemoryPanel]:
    if len(panels) <= MOST_PANELS:
        return list(panels)
    highest = max(range(len(panels)), key=lambda i: panels[i].peak)
    places = {highest}
    for i in range(MOST_PANELS):
        if len(places) < MOST_PANELS:
            places.add(round(i * (len(panels) - 1) / (MOST_PANELS - 1)))
    return [panels[place] for place in sorted(places)]


def _draw_peaks(axes: Axes, panels: Sequence[MemoryPanel], used: Sequence[int]) -> None:
    peaks = [max((sizes for _, sizes in panel.corners), key=sum) for panel in panels]
    bottoms = [0.0] * len(panels)
    for kind in used:
        heights = [peak[kind] for peak in peaks]
        axes.bar(range(len(panels)), heights, 0.7, bottoms, color=KINDS_OF_MEMORY[kind])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    step = -(-len(panels) // 16)
    ticks = range(0, len(panels), step)
    axes.set_xticks(ticks, [panels[i].name for i in ticks])
    axes.set_xlim(-0.6, len(panels) - 0.4)


def _draw_over_time(axes: Axes, panel: MemoryPanel, used: Sequence[int]) -> None:
    times = [time for time, _ in panel.corners]
    bottoms = [0.0] * len(times)
    for kind in used:
        tops = [b + sizes[kind] for b, (_, sizes) in zip(bottoms, panel.corners, strict=True)]
        axes.fill_between(
            times, bottoms, tops, step="post", color=KINDS_OF_MEMORY[kind], linewidth=0
        )
        bottoms = tops
    axes.set_title(panel.name, fontsize=9, loc="left", pad=3)
