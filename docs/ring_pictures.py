"""Drawings of sequence layouts and ring attention, made from the layout objects that the code uses.

    python docs/ring_pictures.py docs/images/context_parallel

writes layouts.svg (which rank computes which part of the score matrix) and, for each layout,
ring_<layout>.svg (which keys each rank holds at each step).
"""

from __future__ import annotations

import sys
from pathlib import Path

from titanlite.modules.attention.layout import LAYOUTS, Layout, Tile, make_layout
from titanlite.tools.figures.canvas import RANKS, Drawing
from titanlite.tools.figures.palette import FAINT, PAPER, QUIET

NUM_RANKS = 4
COLOURS = RANKS[:NUM_RANKS]


def draw_layouts(num_tokens: int = 32) -> str:
    """SVG: the causal score matrix under each layout, coloured by the rank that computes it."""
    cell, gap, top, left = 7, 40, 76, 60
    side = num_tokens * cell
    drawing = Drawing(
        left + len(LAYOUTS) * (side + gap), top + side + 62, "Who computes what under each layout"
    )
    drawing.text(12, 20, "Which rank computes which scores, under each layout", bold=True)
    words = (
        "row: query; column: key; colour: the rank that holds the query; below: each rank's share"
    )
    drawing.text(12, 38, words, size=11)
    for index, name in enumerate(LAYOUTS):
        layout = make_layout(name, NUM_RANKS)
        x = left + index * (side + gap)
        drawing.text(x + side / 2, top - 12, name, "middle", bold=True)
        if index == 0:
            drawing.text(x - 8, top + side / 2, "queries", "end")
        for rank, colour in enumerate(COLOURS):
            for position in layout.positions(rank, num_tokens).tolist():
                y = top + position * cell
                drawing.rectangle(x, y, (position + 1) * cell, cell, colour, stroke=PAPER)
        drawing.rectangle(x, top, side, side, "none", stroke=FAINT)
        n = num_tokens // NUM_RANKS
        ranks = range(NUM_RANKS)
        tiles = [[layout.tiles(rank, other, n, causal=True) for other in ranks] for rank in ranks]
        pairs = [sum(tile.num_pairs for part in of_rank for tile in part) for of_rank in tiles]
        for rank, count in enumerate(pairs):
            y = top + side + 8 + rank * 13
            drawing.rectangle(x, y, side * count / sum(pairs), 10, COLOURS[rank])
            share = f"rank {rank}: {100 * count / sum(pairs):.0f}%"
            drawing.text(x + side * count / sum(pairs) + 5, y + 9, share, size=11)
    return drawing.svg()


def draw_ring(layout: Layout, n: int = 8) -> str:
    """SVG: which keys each rank holds at each step of the ring, and what it computes with them.

    Rows are ranks, columns are steps. A square is the score matrix of one block; its filled part is
    computed. The bar above it shows the keys held: the part that was sent this far.
    """
    side, step_width, row_height, left, top = 52, 150, 82, 84, 84
    drawing = Drawing(
        left + NUM_RANKS * step_width - 40,
        top + NUM_RANKS * row_height - 6,
        f"Ring attention, {layout.name} layout, {layout.num_ranks} ranks",
    )
    drawing.text(12, 20, f"{layout.name}: the causal ring on {layout.num_ranks} ranks", bold=True)
    # On a separate line, because font widths differ.
    drawing.text(
        12,
        38,
        "left bar: queries; top bar: keys held; filled: computed; arrow: keys that travel on",
        size=11,
    )
    for step in range(layout.num_ranks):
        x = left + step * step_width
        drawing.text(x + side / 2, 62, f"step {step}", "middle", bold=True)
        for rank in range(layout.num_ranks):
            y = top + rank * row_height
            owner = layout.holder(rank, -step)
            held = layout.num_keys_carried(owner, step, n, True) if step else n
            if step == 0:
                drawing.text(12, y + side / 2 + 4, f"rank {rank}", bold=True)
            if step + 1 < layout.num_ranks:
                carried = layout.num_keys_carried(owner, step + 1, n, True)
                rows_on = layout.holder(rank, 1) - rank
                start = (x + side + 6, y + side / 2)
                end = (x + step_width - 16, y + side / 2 + rows_on * row_height)
                draw_arrow(drawing, start, end, COLOURS[owner], 3 * carried / n)
            if held:
                _draw_block(drawing, x, y, side, n, rank, owner, held, layout)
            else:
                drawing.text(x + side / 2, y + side / 2 + 4, "idle", "middle", QUIET)
    return drawing.svg()


def draw_arrow(
    drawing: Drawing,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    width: float,
) -> None:
    """A curve with horizontal ends; nothing is drawn if `width` is 0."""
    if not width:
        return
    (x0, y0), (x1, y1) = start, end
    middle = (x0 + x1) / 2
    drawing.elements.append(
        f'<path d="M{x0:g},{y0:g} C{middle:g},{y0:g} {middle:g},{y1:g} {x1:g},{y1:g}" '
        f'fill="none" stroke="{colour}" stroke-width="{width:g}" stroke-opacity="0.75"/>'
    )
    drawing.polygon([(x1 + 6, y1), (x1 - 2, y1 - 4), (x1 - 2, y1 + 4)], colour)


def _draw_block(
    drawing: Drawing,
    x: float,
    y: float,
    side: float,
    n: int,
    rank: int,
    owner: int,
    held: int,
    layout: Layout,
) -> None:
    unit = side / n
    drawing.rectangle(x, y, side, side, PAPER, stroke=FAINT)
    drawing.rectangle(x, y - 9, held * unit, 6, COLOURS[owner])
    drawing.rectangle(x - 9, y, 6, side, COLOURS[rank])
    for tile in layout.tiles(rank, owner, n, causal=True):
        drawing.polygon(_outline(tile, x, y, unit), COLOURS[owner])
    part = "" if held == n else f", first {held} of {n}"
    drawing.text(x + side / 2, y + side + 14, f"keys of {owner}{part}", "middle", size=11)


def _outline(tile: Tile, x: float, y: float, unit: float) -> list[tuple[float, float]]:
    """A tile's corners; a causal tile is a staircase with one stair per token."""
    rows, keys = tile.queries, tile.keys
    left, right = x + keys.start * unit, x + keys.stop * unit
    top, bottom = y + rows.start * unit, y + rows.stop * unit
    if not tile.causal:
        return [(left, top), (right, top), (right, bottom), (left, bottom)]
    stairs = [(left, top)]
    for index in range(rows.stop - rows.start):
        over = left + (index + 1) * unit
        stairs += [(over, top + index * unit), (over, top + (index + 1) * unit)]
    return [*stairs, (left, bottom)]


def draw_all() -> dict[str, str]:
    """Every drawing of this module, by file name."""
    rings = {f"ring_{name}.svg": draw_ring(make_layout(name, NUM_RANKS)) for name in LAYOUTS}
    return {"layouts.svg": draw_layouts(), **rings}


def main(folder: Path) -> None:
    """Write every drawing into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, svg in draw_all().items():
        (folder / file_name).write_text(svg)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
