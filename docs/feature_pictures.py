"""The pictures that the pages on features open with.

    python docs/feature_pictures.py docs/images/features

Each has a light and a dark form.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch

from titanlite.modules.keyed import keyed_normal, sample_keys
from titanlite.tools.figures.canvas import INKS, Drawing
from titanlite.tools.figures.palette import FAINT, GRID, IDLE, INK, ON_CELL, QUIET, STYLE

WIDTH = 850
# The colours of ranks, paler, to write on.
TINTS = ("#8fc3e6", "#f6c667", "#84ceb5", "#e6b6d0")
WORK, EDGE = "#d3e2ee", "#8a949e"
BAR, BAR_EDGE = "#f3ead7", "#c9a95c"


class Picture(Drawing):
    """A drawing of the page's width, with a title and a line below it."""

    def __init__(self, height: float, title: str, caption: str) -> None:
        super().__init__(WIDTH, height, escape(title))
        self.text(12, 22, escape(title), bold=True, size=14)
        self.text(12, 41, escape(caption), colour=QUIET)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        text: str = "",
        size: int = 12,
    ) -> None:
        """A box with one or more lines of text in its middle."""
        empty = fill in (IDLE, "none")
        self.rectangle(x, y, width, height, fill, FAINT if empty else EDGE)
        colour = QUIET if empty else ON_CELL
        lines = text.split("\n")
        for number, line in enumerate(lines):
            middle = y + height / 2 + 0.36 * size + (size + 3) * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, escape(line), "middle", colour, size)

    def bar(self, x: float, y: float, width: float, height: float, text: str) -> None:
        """A collective; its text is upright if the bar is."""
        self.rectangle(x, y, width, height, BAR, BAR_EDGE)
        middle_x, middle_y = x + width / 2, y + height / 2
        turned = f' transform="rotate(-90 {middle_x + 4:g} {middle_y:g})"'
        if height > width:
            self.text(middle_x + 4, middle_y, text, "middle", ON_CELL, more=turned)
        else:
            self.text(middle_x, middle_y + 4, text, "middle", ON_CELL)

    def pointer(
        self, x0: float, y0: float, x1: float, y1: float, colour: str = QUIET, both: bool = False
    ) -> None:
        """A straight arrow, with a head at each end if `both`."""
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        along = (x1 - x0) / length, (y1 - y0) / length
        self.line(x0, y0, x1, y1, colour)
        for x, y, way in [(x1, y1, -1)] + [(x0, y0, 1)] * both:
            back = x + way * 7 * along[0], y + way * 7 * along[1]
            aside = 3.5 * along[1], -3.5 * along[0]
            corners = [(x, y)] + [
                (back[0] + side * aside[0], back[1] + side * aside[1]) for side in (1, -1)
            ]
            self.polygon(corners, colour)

    def stripes(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        texts: Sequence[str],
        owned: Sequence[int],
    ) -> None:
        """A tensor cut into rows, one for each rank; those that are not `owned` are empty."""
        for row, text in enumerate(texts):
            fill = TINTS[row] if row in owned else IDLE
            self.box(x, y + row * height, width, height, fill, text if row in owned else "")

    def svg(self) -> str:
        """In the dark, the names of ranks are lighter."""
        lighter = "".join(
            f'text[fill="{ink}"]{{fill:{tint}}}' for ink, tint in zip(INKS[:4], TINTS, strict=True)
        )
        style = f"<style>@media (prefers-color-scheme: dark) {{{lighter}}}</style>"
        return super().svg().replace(STYLE, STYLE + style)

    def label(self, y: float, words: str, more: str = "") -> None:
        """What a row shows, at its left."""
        self.text(12, y, words, bold=True, size=13)
        for number, line in enumerate(more.split("\n")):
            self.text(12, y + 16 + 15 * number, line, colour=QUIET)

    def columns(self, y: float, left: float, step: float, width: float) -> list[float]:
        """The names of four ranks above their columns; returns the columns' left sides."""
        places = [left + rank * step for rank in range(4)]
        for rank, x in enumerate(places):
            self.text(x + width / 2, y, f"rank {rank}", "middle", INKS[rank], 13, bold=True)
        return places


def fsdp() -> str:
    picture = Picture(
        404,
        "FSDP2: each rank keeps a quarter of every tensor",
        "Here a weight of 32 rows. One unit at a time, such as a block, is whole on all ranks.",
    )
    left, step, width = 150, 174, 160
    places = picture.columns(66, left, step, width)
    rows = [f"rows {8 * rank}..{8 * rank + 7}" for rank in range(4)]
    across = 3 * step + width
    for y, owns, words, more in (
        (76, "own", "kept", "weights, moments"),
        (190, "all", "computing", "one unit at a time,\nthen freed"),
        (304, "own", "kept", "gradients,\nsummed over ranks"),
    ):
        picture.label(y + 20, words, more)
        for rank, x in enumerate(places):
            picture.stripes(x, y, width, 17, rows, [rank] if owns == "own" else range(4))
    for y, name in ((155, "all-gather the weights"), (269, "reduce-scatter the gradients")):
        picture.bar(left, y, across, 22, name)
        for x in places:
            picture.pointer(x + width / 2, y - 11, x + width / 2, y - 1)
            picture.pointer(x + width / 2, y + 22, x + width / 2, y + 34)
    picture.text(
        left + across / 2,
        394,
        "The optimizer updates only the rows that a rank keeps.",
        "middle",
        QUIET,
    )
    return picture.svg()


def data_parallel() -> str:
    picture = Picture(
        344,
        "DDP: each rank has the whole model and its own samples",
        "The gradients are summed, so every rank takes the same optimizer step.",
    )
    left, step, width = 150, 174, 160
    places = picture.columns(66, left, step, width)
    for y, words, more in (
        (92, "samples", "of a batch of 8"),
        (134, "weights", "all, on each rank"),
        (188, "gradients", "of its own samples"),
        (274, "sum", "on every rank"),
        (318, "weights", "after the step"),
    ):
        picture.label(y, words, more)
    for rank, x in enumerate(places):
        for number in range(2):
            fill = TINTS[rank]
            picture.box(x + 82 * number, 78, 78, 26, fill, f"{2 * rank + number}")
        picture.pointer(x + width / 2, 106, x + width / 2, 119)
        picture.box(x, 120, width, 34, WORK, "w")
        picture.pointer(x + width / 2, 156, x + width / 2, 173)
        picture.box(x, 174, width, 30, TINTS[rank], f"g{rank}")
        picture.pointer(x + width / 2, 205, x + width / 2, 216)
        picture.pointer(x + width / 2, 240, x + width / 2, 251)
        for other in range(4):
            picture.rectangle(x + width / 4 * other, 252, width / 4, 34, TINTS[other])
        picture.box(x, 252, width, 34, "none")
        picture.text(x + width / 2, 273, "g0 + g1 + g2 + g3", "middle", ON_CELL)
        picture.pointer(x + width / 2, 288, x + width / 2, 303)
        picture.box(x, 304, width, 30, WORK, "the same new w")
    picture.bar(left, 218, 3 * step + width, 22, "all-reduce: g0 + g1 + g2 + g3")
    return picture.svg()


def hsdp() -> str:
    picture = Picture(
        372,
        "HSDP: sharded within a group, copied between groups",
        "The mesh dp_replicate 2 x dp_shard 2. A group is usually one machine.",
    )
    width, places = 236, (36, 578)
    for group, top in enumerate((54, 238)):
        picture.rectangle(12, top, WIDTH - 24, 122, "none", FAINT)
        picture.text(22, top + 18, f"dp_replicate {group}", bold=True)
        for shard, x in enumerate(places):
            rank = 2 * group + shard
            name = f"rank {rank}: dp_shard {shard}, samples {2 * rank} and {2 * rank + 1}"
            picture.text(x + width / 2, top + 38, name, "middle")
            for half in range(2):
                fill = TINTS[half] if half == shard else IDLE
                text = f"half {half} of the weights" if half == shard else ""
                picture.box(x, top + 48 + 30 * half, width, 30, fill, text)
        middle = (places[0] + width + places[1]) / 2
        picture.pointer(places[0] + width + 8, top + 78, places[1] - 8, top + 78, both=True)
        picture.text(middle, top + 68, "all-gather the weights", "middle")
        picture.text(middle, top + 95, "reduce-scatter the gradients", "middle")
        picture.text(middle, top + 111, "in each microbatch, on fast links", "middle", QUIET)
    for shard, x in enumerate(places):
        picture.pointer(x + width / 2, 180, x + width / 2, 234, both=True)
        words = f"all-reduce half {shard} of the gradients"
        end, where = ("start", x + width / 2 + 12) if not shard else ("end", x + width / 2 - 12)
        picture.text(where, 203, words, end)
        picture.text(where, 219, "once per step, on slow links", end, QUIET)
    return picture.svg()


def tensor_parallel() -> str:
    picture = Picture(
        328,
        "TP: one block on four ranks",
        "Norms and additions work on a quarter of the tokens, the rest on all tokens with a "
        "quarter of the weights.",
    )
    top, lane = 92, 44
    parts: list[tuple[str, int, str]] = [
        ("x", 34, "tokens"),
        ("norm", 46, "tokens"),
        ("all-gather", 26, ""),
        ("wq wk wv", 66, "heads"),
        ("attention", 66, "heads"),
        ("wo", 36, "heads"),
        ("reduce-scatter", 26, ""),
        ("add", 34, "tokens"),
        ("norm", 46, "tokens"),
        ("all-gather", 26, ""),
        ("w1 w3", 54, "hidden"),
        ("w2", 36, "hidden"),
        ("reduce-scatter", 26, ""),
        ("add", 34, "tokens"),
    ]
    spans: list[tuple[str, float, float]] = [("", 0, 0)]  # of neighbours of one kind
    x = 72.0
    gap = (WIDTH - 12 - x - sum(width for _, width, _ in parts)) / (len(parts) - 1)
    for rank in range(4):
        y = top + lane * rank
        picture.text(12, y + 20, f"rank {rank}", colour=INKS[rank], size=13, bold=True)
        picture.line(x, y + 16, WIDTH - 12, y + 16, QUIET)
    for name, width, kind in parts:
        if kind:
            for rank in range(4):
                y = top + lane * rank
                text = f"x{rank}" if name == "x" else name
                picture.box(x, y, width, 32, TINTS[rank], text)
            last, start, _ = spans[-1]
            if last == kind:
                spans[-1] = kind, start, x + width
            else:
                spans.append((kind, x, x + width))
        else:
            picture.bar(x, top - 6, width, 3 * lane + 44, name)
            spans.append(("", 0, 0))
        x += width + gap
    words = {
        "tokens": ("tokens: 1/4", ""),
        "heads": ("all tokens, 1/4 of the heads", "wq, wk, wv are split by outputs, wo by inputs"),
        "hidden": ("1/4 of hidden units", "w1, w3 by outputs, w2 by inputs"),
    }
    bottom = top + 4 * lane
    for kind, start, end in (span for span in spans if span[0]):
        above, below = words[kind]
        middle = (start + end) / 2
        if end - start < 50:
            middle -= 14
        picture.line(start, top - 12, end, top - 12, INK)
        picture.text(middle, top - 19, above, "middle")
        if below:
            picture.line(start, bottom + 2, end, bottom + 2, INK)
            picture.text(middle, bottom + 20, below, "middle")
    picture.text(
        12,
        bottom + 47,
        "Each rank's output of wo and w2 is a Partial sum over all tokens. The reduce-scatter adds "
        "them, and gives each rank its tokens.",
        colour=QUIET,
    )
    return picture.svg()


def expert_parallel() -> str:
    picture = Picture(
        388,
        "Experts: 8 of them on four ranks, each token sent to K = 2",
        "A square is a slot, a token's place at one expert. It has the expert's number, and the "
        "colour of the rank that has the expert.",
    )
    chosen = random.Random(2)
    slots = [[expert for _ in range(4) for expert in chosen.sample(range(8), 2)] for _ in range(4)]
    received = [
        sorted(expert for rank in slots for expert in rank if expert // 2 == owner)
        for owner in range(4)
    ]
    top, lane, cell = 86, 32, 17

    def squares(x: float, y: float, experts: Sequence[int], gap: int = 0) -> None:
        for number, expert in enumerate(experts):
            place = x + cell * number + (number // 2 * gap)
            picture.box(place, y, cell, cell, TINTS[expert // 2], f"{expert}", 11)

    for x, words in (
        (146, "4 tokens, routed"),
        (361, "slots sorted by expert"),
        (540, "SwiGLU"),
        (700, "outputs"),
        (806, "tokens"),
    ):
        picture.text(x, top - 14, words, "middle", QUIET)
    for rank in range(4):
        y = top + lane * rank
        picture.text(12, y + 14, f"rank {rank}", colour=INKS[rank], size=13, bold=True)
        squares(70, y + 2, slots[rank], 5)
        squares(270, y + 2, received[rank])
        picture.box(490, y, 100, 22, TINTS[rank], f"experts {2 * rank}, {2 * rank + 1}")
        squares(624, y + 2, slots[rank], 5)
        picture.text(785, y + 15, "&#8594;", "middle", size=14)
        for token in range(4):
            picture.box(797 + 11 * token, y + 5, 9, 12, TINTS[rank])
    for x in (236, 598):
        picture.bar(x, top - 4, 20, 4 * lane - 2, "all-to-all")
    below = top + 4 * lane + 30
    picture.text(12, below, "Where the experts' weights are, with dp_shard 2 x tp 2", bold=True)
    words = "filled: kept; small: gathered to compute"
    picture.text(WIDTH - 26, below, words, "end", QUIET)
    for row, (ep, efsdp) in enumerate(((2, 2), (4, 1))):
        y = below + 44 + 56 * row
        picture.text(12, y + 8, f"ep {ep}, efsdp {efsdp}", bold=True)
        more = "4 computed, 2 kept" if efsdp == 2 else "2 computed and kept"
        picture.text(12, y + 25, more, colour=QUIET)
        for rank in range(4):
            x = 190 + 166 * rank
            if row == 0:
                picture.text(x + 4 * cell, y - 26, f"rank {rank}", "middle", INKS[rank], bold=True)
            held = 8 // ep  # experts that the rank computes, and keeps a part of
            first = rank % ep * held
            kept = first + rank // ep * (held // efsdp)
            for expert in range(8):
                place = x + cell * expert
                if row == 0:
                    picture.text(place + cell / 2, y - 10, f"{expert}", "middle", QUIET, 11)
                fill = TINTS[rank] if kept <= expert < kept + held // efsdp else IDLE
                picture.box(place, y - 4, cell, 30, fill)
                if fill == IDLE and first <= expert < first + held:
                    picture.rectangle(place + 5, y + 7.5, 7, 7, TINTS[rank], EDGE)
    return picture.svg()


def activation_checkpoint() -> str:
    """The bars are those of the table on the page."""
    page = Path(__file__).with_name("activation_checkpoint.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (none|\"2\"|op|full) \| ([\d,]+) \| [\d,]+ \| ([\d.]+) \|$", page, re.M)
    picture = Picture(
        322,
        "What the forward pass keeps for the backward pass",
        "Filled: kept. Empty: computed again. A block's first square is its input.",
    )
    names = ("", "q", "k", "v", "att", "o", "w1", "w3", "w2")
    saved_by_op = {"", "q", "v", "att", "w1", "w2"}
    left, block, gap, top, lane = 66, 204, 12, 92, 56
    widths = [20, 20, 20, 20, 32, 20, 24, 24, 24]
    largest = int(rows[0][1].replace(",", ""))
    for number in range(2):
        middle = left + number * (block + gap) + block / 2
        picture.text(middle, top - 14, f"block {number}", "middle", bold=True)
    picture.text(512, top - 14, "bytes kept", bold=True)
    picture.text(712, top - 14, "FLOPs of products", bold=True)
    for row, (mode, kept, flops) in enumerate(rows):
        y = top + lane * row
        picture.text(12, y + 22, escape(mode), bold=True, size=13)
        for number in range(2):
            x = left + number * (block + gap)
            for name, width in zip(names, widths, strict=True):
                keeps = {
                    "none": True,
                    '"2"': number % 2 == 0 or not name,
                    "op": name in saved_by_op,
                    "full": not name,
                }[mode]
                fill = (TINTS[1] if not name else TINTS[0]) if keeps else IDLE
                picture.box(x, y, width, 36, fill, name, 11)
                x += width
        size = int(kept.replace(",", ""))
        picture.rectangle(512, y + 6, 120 * size / largest, 24, TINTS[0], EDGE)
        picture.text(520 + 120 * size / largest, y + 22, f"{size / 1e6:.1f} MB")
        picture.rectangle(712, y + 6, 70 * float(flops), 24, GRID, FAINT)
        picture.text(720, y + 22, f"x {float(flops):.2f}")
    return picture.svg()


def compiled() -> str:
    picture = Picture(
        298,
        "Compile: one graph for all blocks",
        "The blocks have the same code and shapes, so one compilation serves them all.",
    )
    y = 64
    chain = [
        ("embeddings", 94, IDLE),
        ("block 0", 84, TINTS[0]),
        ("block 1", 84, TINTS[0]),
        ("...", 40, "none"),
        ("block L-1", 84, TINTS[0]),
        ("norm, output", 104, IDLE),
        ("loss", 84, TINTS[1]),
    ]
    gap = (WIDTH - 24 - sum(width for _, width, _ in chain)) / (len(chain) - 1)
    x = 12.0
    for number, (name, width, fill) in enumerate(chain):
        if fill == "none":
            picture.text(x + width / 2, y + 24, "...", "middle", size=16, bold=True)
        else:
            picture.box(x, y, width, 40, fill, name, 13)
        if number:
            picture.pointer(x - gap + 3, y + 20, x - 3, y + 20)
        if fill in TINTS:
            picture.pointer(x + width / 2, y + 43, x + width / 2, 156)
        x += width + gap
    picture.box(100, 158, 500, 112, "none")
    picture.text(350, 178, "compiled once, used L times", "middle", bold=True)
    operators = ["norm", "wq wk wv", "rotate", "attention", "wo", "+", "..."]
    place = 116.0
    for name in operators:
        width = 14 + 7.4 * len(name)
        picture.box(place, 190, width, 24, TINTS[0], name)
        place += width + 10
    picture.text(116, 238, "one graph, no graph break: elementwise steps are fused,")
    picture.text(116, 256, "TP's collectives and AC's recomputation are inside")
    picture.box(WIDTH - 212, 158, 200, 112, "none")
    picture.text(WIDTH - 112, 178, "a graph of its own", "middle", bold=True)
    picture.box(WIDTH - 184, 190, 144, 24, TINTS[1], "cross-entropy")
    picture.text(
        12,
        290,
        "Grey: not compiled. The collectives of FSDP and DDP stay outside the graphs.",
        colour=QUIET,
    )
    return picture.svg()


# The sign, the exponent and the fraction of a number.
BITS = {"float32": (1, 8, 23), "bfloat16": (1, 8, 7), "e4m3": (1, 4, 3), "e5m2": (1, 5, 2)}


def _bits(picture: Picture, x: float, y: float, dtype: str, cell: float = 7.5) -> None:
    fills = (GRID, TINTS[1], TINTS[0])
    for count, fill in zip(BITS[dtype], fills, strict=True):
        for _ in range(count):
            picture.rectangle(x, y, cell, 16, fill, EDGE if fill != GRID else FAINT)
            x += cell


def mixed_precision() -> str:
    picture = Picture(
        258,
        "Mixed precision: compute in 16 bits, keep and add up in 32",
        "A cell is a bit: sign, then exponent, which is the range, then fraction, which is the "
        "precision.",
    )
    width, top = 252, 62
    for number, (key, dtype, lines) in enumerate(
        (
            ("dtype", "float32", ["weights, AdamW's moments,", "the optimizer step"]),
            ("mixed_precision_param", "bfloat16", ["gathered weights, activations,", "products"]),
            (
                "mixed_precision_reduce",
                "float32",
                ["reduce-scatter and all-reduce", "of gradients"],
            ),
        )
    ):
        x = 12 + number * (width + 35)
        picture.rectangle(x, top, width, 138, "none", EDGE)
        picture.text(x + 9, top + 22, key, bold=True, size=13)
        picture.text(x + width - 9, top + 22, dtype, "end", size=12)
        _bits(picture, x + 6, top + 38, dtype)
        for row, line in enumerate(lines):
            picture.text(x + 9, top + 82 + 18 * row, line, size=13)
        picture.text(x + 9, top + 126, f"{sum(BITS[dtype]) // 8} bytes per number", colour=QUIET)
        if number:
            picture.pointer(x - 33, top + 69, x - 2, top + 69)
            picture.text(x - 18, top + 60, "cast", "middle", QUIET, 11)
    first, last, low = 12 + width / 2, 12 + 2 * (width + 35) + width / 2, top + 168
    picture.line(last, top + 138, last, low, QUIET)
    picture.line(last, low, first, low, QUIET)
    picture.pointer(first, low, first, top + 140)
    picture.text(
        WIDTH / 2, low + 20, "the summed gradient, cast to dtype, goes to the optimizer", "middle"
    )
    return picture.svg()


def float8() -> str:
    picture = Picture(
        330,
        "Float8: a linear layer multiplies in 8 bits",
        "The largest magnitude of an operand, its amax, becomes the largest number of its format.",
    )
    for row, (name, shape, split) in enumerate(
        (("x", "[tokens, K]", "split x"), ("W", "[N, K]", "split W"))
    ):
        y = 62 + 116 * row
        fill = TINTS[2 + row]  # not a colour of the bits
        picture.box(12, y, 124, 92, fill, f"{name}  {shape}\n\nin the layer's\nown dtype", 13)
        picture.pointer(138, y + 46, 168, y + 46)
        picture.box(
            170, y, 196, 92, fill, f"amax of {name}\n\nMAX over the ranks\nthat {split}", 13
        )
        picture.pointer(368, y + 46, 398, y + 46)
        picture.box(400, y, 196, 92, fill, f"{name} * 448 / amax\n\n\n", 13)
        _bits(picture, 440, y + 42, "e4m3", 15)
        picture.text(498, y + 78, "float8, e4m3", "middle", ON_CELL, 12)
        picture.pointer(598, y + 46, 638, 150 + 12 * row)
    picture.box(640, 116, 80, 82, WORK, "product\n\nin 8 bits", 13)
    picture.pointer(722, 157, 740, 157)
    picture.box(742, 116, 96, 82, WORK, "output\n[tokens, N]\n\nown dtype", 13)
    # A scale of powers of two.
    for number, (dtype, largest, smallest, use) in enumerate(
        (
            ("e4m3", "448", "2^-9", "for x and W"),
            ("e5m2", "57,344", "2^-16", "for the output's gradient (tensorwise)"),
        )
    ):
        bits = "{} sign, {} exponent, {} fraction bits".format(*BITS[dtype])
        x = 12 + 410 * number
        _bits(picture, x, 298, dtype, 12)
        picture.text(x + 104, 304, f"{dtype}, {use}", size=12)
        picture.text(x + 104, 320, f"{bits}; {smallest} to {largest}", colour=QUIET)
    return picture.svg()


def mesh() -> str:
    picture = Picture(
        324,
        "dp_replicate 2 x dp_shard 2 x tp 2 = 8 ranks",
        "A line joins the ranks of a process group. Those of rank 0 are bold.",
    )
    axes = (
        ("dp_replicate", 4, "#d55e00", "other samples,", "the same shard of the weights"),
        ("dp_shard", 2, "#2aa57f", "other samples,", "another shard of the weights"),
        ("tp", 1, "#3d8fd1", "the same samples,", "other heads and hidden units"),
    )

    def place(rank: int) -> tuple[float, float]:
        replicate, shard, tp = rank >> 2, rank >> 1 & 1, rank & 1
        return 70 + 270 * tp + 140 * replicate, 168 + 120 * shard - 72 * replicate

    for number, (axis, far, colour, *words) in enumerate(axes):
        for rank in (7, 6, 5, 4, 3, 2, 1, 0):
            if not rank & far:
                (x0, y0), (x1, y1) = place(rank), place(rank | far)
                width = 1.5 if rank else 5
                picture.elements.append(
                    f'<path d="M{x0:g},{y0:g} L{x1:g},{y1:g}" stroke="{colour}" '
                    f'stroke-width="{width:g}"/>'
                )
        y = 104 + 74 * number
        picture.rectangle(572, y - 7, 30, 5, colour)
        picture.text(614, y, f"{axis}: ranks 0 and {far}", bold=True, size=13)
        for line, text in enumerate(words):
            picture.text(614, y + 18 + 16 * line, text, colour=QUIET)
    for rank in range(8):
        x, y = place(rank)
        picture.box(x - 42, y - 19, 84, 38, TINTS[0] if rank == 0 else WORK, f"rank {rank}", 13)
    return picture.svg()


def randomness() -> str:
    picture = Picture(
        352,
        "The noise of samples 0 to 3, in one process and on two ranks",
        "8 x 8 numbers for each sample, as drawn. Blue is negative, orange positive.",
    )

    def torch_randn(ranks: int) -> torch.Tensor:
        drawn = []
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(rank)
            drawn.append(torch.randn(4 // ranks, 8, 8, generator=generator))
        return torch.cat(drawn)

    def keyed(ranks: int) -> torch.Tensor:
        parts = torch.arange(4).chunk(ranks)
        return torch.cat([keyed_normal(sample_keys(part), (8, 8)) for part in parts])

    cell, step, left = 9, 80, (132, 478)
    for column, words in enumerate(("one process", "rank 0", "rank 1")):
        x = (left[0], left[1], left[1] + 2 * step)[column]
        picture.text(x, 68, words, bold=True, colour=(INK, *INKS)[column], size=13)
    for row, (name, draw, more) in enumerate(
        (
            ("torch.randn", torch_randn, "depends on seed,\nstep and rank"),
            ("keyed_normal", keyed, "depends on seed,\nsample, name\nand element"),
        )
    ):
        y = 80 + 138 * row
        picture.label(y + 24, name, more)
        one, two = draw(1), draw(2)
        for sample in range(4):
            for number, noise in enumerate((one, two)):
                x = left[number] + sample * step
                _noise(picture, x, y, noise[sample], cell)
                if number and not torch.equal(one[sample], two[sample]):
                    picture.text(x + 36, y + 108, "differs", "middle", "#e5534b", bold=True)
                elif number:
                    picture.text(x + 36, y + 108, "the same", "middle", "#2da44e", bold=True)
                picture.text(x + 36, y + 90, f"sample {sample}", "middle", QUIET)
    picture.text(
        12,
        344,
        "TokenDropout draws as keyed_normal does: from seed, token, module and feature.",
        colour=QUIET,
    )
    return picture.svg()


def _noise(picture: Picture, x: float, y: float, values: torch.Tensor, cell: float) -> None:
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            # Few levels, so that the last bit of a number shows nothing.
            level = max(-4, min(4, round(2 * value)))
            end = (0xE6, 0x9F, 0x00) if level > 0 else (0x00, 0x72, 0xB2)
            share = abs(level) / 4
            parts = [round(0xF4 + (one - 0xF4) * share) for one in end]
            picture.rectangle(x + cell * j, y + cell * i, cell, cell, "#" + bytes(parts).hex())


PICTURES = {
    "fsdp": fsdp,
    "data_parallel": data_parallel,
    "hsdp": hsdp,
    "tensor_parallel": tensor_parallel,
    "expert_parallel": expert_parallel,
    "activation_checkpoint": activation_checkpoint,
    "compile": compiled,
    "mixed_precision": mixed_precision,
    "float8": float8,
    "mesh": mesh,
    "randomness": randomness,
}


def main(folder: Path) -> None:
    """Write every picture into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
