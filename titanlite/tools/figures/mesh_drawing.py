"""A drawing of the mesh in plain ASCII: the position of each rank on the axes."""

import itertools
import math
from collections.abc import Sequence

from titanlite.mesh.parallel_dims import Grid

_MAX_WIDTH = 80
_MAX_ROWS = 8
_MAX_GROUP = 8
# Marks the place in a truncated axis where coordinates are left out.
_GAP = None
Place = tuple[int | None, ...]  # a coordinate on each axis


def draw_mesh(dims: Grid) -> str:
    """Draw one cell per rank: the innermost axis across, the others down, without degree-1 axes.

    The drawing has at most 80 columns and about 30 lines. Of an axis that is too long, the first
    coordinates and the last one are shown. The groups of rank 0 on each axis are listed below.
    """
    axes = [(axis, size) for axis, size in dims.degrees.items() if size > 1]
    if not axes:
        return "mesh: 1 rank, nothing is split"
    names = [axis for axis, _ in axes]
    title = " x ".join(f"{axis} {size}" for axis, size in axes)
    lines = [f"mesh: {title} = {dims.world_size} ranks", ""]
    lines += _grid(axes, dims)
    if len(axes) > 1:
        lines += ["", "rank 0 is grouped"]
        widest = max(len(axis) for axis in names)
        for axis in names:
            lines.append(f"  over {axis.ljust(widest)} with {_shortened(dims.group(0, axis))}")
    return "\n".join(lines)


def _grid(axes: Sequence[tuple[str, int]], dims: Grid) -> list[str]:
    *outer, (across, num_columns) = axes
    names = [axis for axis, _ in outer]
    digits = len(str(dims.world_size - 1))
    places = _rows(outer)
    label_widths = [len(_label(axis, size - 1)) for axis, size in outer]
    label_width = max(sum(label_widths) + 2 * max(len(outer) - 1, 0), len(across), len("rank"))
    room = _MAX_WIDTH - label_width - 2
    # If a row fits only without a blank after each number, draw it so rather than truncate it.
    tight = num_columns * (digits + 2) <= room < num_columns * (digits + 3)
    cell = digits + (1 if tight else 2)
    fitting = room // (cell + 1)
    columns = _shown(num_columns, num_columns if num_columns <= fitting else max(fitting - 1, 2))

    def row(label: str, cells: Sequence[str], bar: str = "|") -> str:
        body = bar.join(f"{text:>{digits + 1}}".ljust(cell) for text in cells)
        return f"{label.rjust(label_width)} {bar}{body}{bar}".rstrip()

    rule = f"{' ' * label_width} +" + "+".join("-" * cell for _ in columns) + "+"
    dots = "..."[: digits + 1]
    lines = [row(across, [dots if c is _GAP else str(c) for c in columns], bar=" "), rule]
    previous: Place = ()
    for place in places:
        if previous and place[:-1] != previous[:-1]:
            lines.append(rule)
        label = "  ".join(
            (_label(name, at) if is_new else "").ljust(width)
            for name, at, is_new, width in zip(
                names, place, _new(place, previous), label_widths, strict=True
            )
        )
        if _GAP in place:
            lines.append(label.rstrip())
        else:
            here = {name: at for name, at in zip(names, place, strict=True) if at is not None}
            ranks = [
                dots if at is _GAP else str(dims.rank(**here, **{across: at})) for at in columns
            ]
            lines.append(row(label if outer else "rank", ranks))
        previous = place
    return lines if _GAP in previous else [*lines, rule]


def _label(axis: str, at: int | None) -> str:
    return f"{axis} {'...' if at is _GAP else at}"


def _rows(outer: Sequence[tuple[str, int]]) -> list[Place]:
    """The places on the outer axes to draw; a gap on one axis covers all inner axes too."""
    limits = [size for _, size in outer]
    while math.prod(limits) > _MAX_ROWS and max(limits) > 1:
        limits[limits.index(max(limits))] -= 1
    shown = [_shown(size, limit) for (_, size), limit in zip(outer, limits, strict=True)]
    rows: list[Place] = []
    for place in itertools.product(*shown):
        if _GAP in place:
            first = place.index(_GAP)
            place = place[:first] + (_GAP,) * (len(place) - first)
        if not rows or rows[-1] != place:
            rows.append(place)
    return rows


def _new(place: Place, previous: Place) -> list[bool]:
    """Which coordinates of a row get a label: from the first that changed, up to a gap."""
    shown = []
    for i in range(len(place)):
        inside_gap = _GAP in place[:i]
        shown.append(place[: i + 1] != previous[: i + 1] and not inside_gap)
    return shown


def _shown(size: int, limit: int) -> list[int | None]:
    """Coordinates 0 .. size - 1; if more than `limit`, the first ones, a gap, and the last."""
    if size <= limit:
        return list(range(size))
    if limit == 1:
        return [0, _GAP]
    return [*range(limit - 1), _GAP, size - 1]


def _shortened(group: Sequence[int]) -> str:
    if len(group) <= _MAX_GROUP:
        return ", ".join(map(str, group))
    return ", ".join(map(str, group[:3])) + f", ... {group[-1]} ({len(group)} ranks)"
