"""Draws the matrix as one HTML page: a cell for each pair of features, a row for each plan.

A cell is darker the larger the smallest margin of its plans, red if one differs, and empty if no
legal plan has that pair. Hovering shows the pair; a click lists only its plans in the table.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from titanlite.mesh.parallel_dims import AXES
from titanlite.quantities import format_duration
from titanlite.tools.figures.page_file import make_page

Value = tuple[str, Any]
CELL, TOP = 15, 34
LABEL = 172
OFF = "-"

# (upper limit of the margin, color, legend), from small to large margins.
SHADES = (
    (1e2, "#cfe8d5", "margin below 100"),
    (3e2, "#a3d4b0", "100 to 300"),
    (1e3, "#6fba87", "300 to 1,000"),
    (3e3, "#3f9c63", "1,000 to 3,000"),
    (math.inf, "#1f7a45", "above 3,000"),
)
DIFFERS, NOT_RUN, NO_PLAN = "#d6453d", "#ffffff", "#f1f1ef"


def draw_overview(
    results: Sequence[Mapping[str, Any]],
    features: Mapping[str, Sequence[Any]],
    num_ranks: int,
    plans: Sequence[Mapping[str, Any]],
) -> str:
    """The page for the `results` so far; `plans` are all choices, run or not."""
    values = [(name, value) for name, options in features.items() for value in options]
    of_pair: dict[tuple[Value, Value], list[int]] = defaultdict(list)
    for index, result in enumerate(results):
        for pair in _pairs_of(result["choice"], values):
            of_pair[pair].append(index)
    planned = {pair for plan in plans for pair in _pairs_of(plan, values)}
    return make_page(
        Path(__file__).with_name("page") / "overview",
        f"titanlite verify: every pair of features on {num_ranks} ranks",
        None,
        num_ranks=num_ranks,
        tiles=_tiles(results, len(plans), of_pair, planned),
        legend=_legend(),
        picture=_picture(values, of_pair, planned, results),
        header="".join(f"<th>{escape(name)}</th>" for name in features),
        rows="\n".join(
            _row(number, result, features)
            for number, result in sorted(enumerate(results), key=lambda item: _order(item[1]))
        ),
    )


def _pairs_of(choice: Mapping[str, Any], values: Sequence[Value]) -> Iterable[tuple[Value, Value]]:
    """Every pair of a choice's values, in the order of `values`."""
    own = [value for value in values if choice.get(value[0]) == value[1]]
    return [(a, b) for i, a in enumerate(own) for b in own[i + 1 :]]


def _order(result: Mapping[str, Any]) -> tuple[bool, float]:
    margin = result.get("margin")
    return bool(result["agrees"]), math.inf if margin is None else margin


def _tiles(
    results: Sequence[Mapping[str, Any]],
    num_plans: int,
    of_pair: Mapping[tuple[Value, Value], list[int]],
    planned: set[tuple[Value, Value]],
) -> str:
    wrong = sum(not result["agrees"] for result in results)
    margins = [r["margin"] for r in results if r.get("margin") is not None]
    largest = max((r["largest"] for r in results if r.get("largest") is not None), default=0.0)
    tiles = [
        ("plans verified", f"{len(results)} of {num_plans}"),
        ("pairs of features covered", f"{len(of_pair):,} of {len(planned):,}"),
        ("plans that differ", str(wrong)),
        ("largest difference", f"{largest:.1e}"),
        ("smallest margin", f"{min(margins):,.0f}" if margins else "-"),
        ("time", format_duration(sum(r["seconds"] for r in results))),
    ]
    return "".join(
        f'<div class="tile{" bad" if wrong and name == "plans that differ" else ""}">'
        f"<b>{escape(value)}</b>{escape(name)}</div>"
        for name, value in tiles
    )


def _legend() -> str:
    entries = [(color, words) for _, color, words in SHADES]
    entries += [(DIFFERS, "differs"), (NOT_RUN, "not run yet"), (NO_PLAN, "no legal plan")]
    return "".join(
        f'<span><i style="background:{color}"></i>{escape(words)}</span>'
        for color, words in entries
    )


def _color(results: Sequence[Mapping[str, Any]]) -> str:
    if not all(result["agrees"] for result in results):
        return DIFFERS
    margin = min(_order(result)[1] for result in results)
    return next(color for limit, color, _ in SHADES if margin <= limit)


def _picture(
    values: Sequence[Value],
    of_pair: Mapping[tuple[Value, Value], list[int]],
    planned: set[tuple[Value, Value]],
    results: Sequence[Mapping[str, Any]],
) -> str:
    """The lower triangle: each value against all values before it, with a gap between features."""
    places, position, last = [], float(TOP), None
    for name, _ in values:
        if name != last:
            position += 5
            last = name
        places.append(position)
        position += CELL
    width, height = position - TOP + LABEL + 110, position + 6
    parts = [
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        'font-family="inherit" font-size="10.5">'
    ]
    seen: set[str] = set()
    for row, (name, value) in enumerate(values):
        y = places[row]
        middle = y + CELL * 0.74
        parts.append(
            f'<text x="{LABEL - 6}" y="{middle:g}" text-anchor="end">{_shown(value)}</text>'
        )
        if name not in seen:
            seen.add(name)
            parts.append(f'<text x="4" y="{middle:g}" class="name">{escape(name)}</text>')
        x = LABEL + places[row] - TOP + CELL * 0.5
        parts.append(
            f'<text transform="translate({x + 4:g} {y - 3:g}) rotate(-38)" class="end">'
            f"{escape(name)} {_shown(value)}</text>"
        )
        for column in range(row):
            pair = values[column], values[row]
            if values[column][0] == name:
                continue
            numbers = of_pair.get(pair, [])
            title = f"{_named(pair[0])} with {_named(pair[1])}"
            if numbers:
                color = _color([results[number] for number in numbers])
                margin = min(_order(results[number])[1] for number in numbers)
                reported = "margin at least " + (f"{margin:,.0f}" if margin < math.inf else "any")
                title += f": {len(numbers)} plan{'s' if len(numbers) > 1 else ''}, {reported}"
            elif pair in planned:
                color, title = NOT_RUN, f"{title}: not run yet"
            else:
                color, title = NO_PLAN, f"{title}: no legal plan"
            ids = f' data-plans="{" ".join(map(str, numbers))}"' if numbers else ""
            stroke = ' stroke="#cccccc"' if color == NOT_RUN else ""
            parts.append(
                f'<rect x="{LABEL + places[column] - TOP:g}" y="{y:g}" width="{CELL - 1.5:g}" '
                f'height="{CELL - 1.5:g}" rx="2" fill="{color}"{stroke}{ids}>'
                f"<title>{escape(title)}</title></rect>"
            )
    parts.append("</svg>")
    return "".join(parts)


def _shown(value: Any) -> str:
    return escape(str(value))


def _named(value: Value) -> str:
    name, of = value
    return f"no {name}" if of == OFF else f"{name} {of}"


def _row(number: int, result: Mapping[str, Any], features: Mapping[str, Sequence[Any]]) -> str:
    choice = result["choice"]
    cells = []
    for name in features:
        value = choice.get(name, OFF)
        is_off = value in (OFF, "off", "none") or (name in AXES and value == 1)
        cells.append(f'<td class="{"off" if is_off else "on"}">{_shown(value)}</td>')
    margin = result.get("margin")
    largest = result.get("largest")
    if not result["agrees"]:
        verdict = f'<td class="bad" colspan="2">{escape(result["cause"])}</td>'
    else:
        width = 0.0 if margin is None else min(1.0, math.log10(max(1.0, margin)) / 4) * 70
        shown = "exact" if margin is None else f"{margin:,.0f}"
        figure = "0" if not largest else f"{largest:.0e}"
        verdict = (
            f'<td class="figure">{figure}</td><td class="figure">'
            f'<s style="width:{width:.0f}px"></s>{shown}</td>'
        )
    return (
        f'<tr data-plan="{number}">{verdict}'
        f'<td class="figure">{result["seconds"]:.1f}</td>{"".join(cells)}</tr>'
    )
