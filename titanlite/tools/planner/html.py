"""A plan, and the plans that a search has found, as one self-contained HTML page. Torch-free.

The page (page/) draws plain values: the figures of report.py, the spans of spans.py, and the plans
of a search. It loads nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.tools.figures import palette
from titanlite.tools.figures.page_file import make_page
from titanlite.tools.planner.events import FROM_RANK_TO_RANK, TO_DEVICE, TO_HOST
from titanlite.tools.planner.report import AXIS_SHARES, COMPUTE_SHARES, IDLE, LAUNCH, MEMORY_SHARES
from titanlite.tools.planner.spans import LANE_OF, StepSpan
from titanlite.tools.simulate.streams import MAIN

FOLDER = Path(__file__).with_name("page")
BOTH_WAYS = (*FROM_RANK_TO_RANK, TO_DEVICE, TO_HOST)
COLORS = {
    "memory": {share.name: share.color for share in MEMORY_SHARES},
    "time": {
        **{kind: share.color for kind, share in COMPUTE_SHARES.items()},
        **{share.name: share.color for share in (*AXIS_SHARES.values(), LAUNCH, IDLE)},
    },
    "communication": {kind: palette.LANES[lane] for kind, lane in LANE_OF.items()}
    | {"all_reduce": "#a63603", "all_to_all": palette.LANES["EXCHANGE"]}
    | {TO_DEVICE: "#c51b7d", TO_HOST: "#4d9221"},
    # Neighbouring modules of a phase alternate between two shades.
    "phase": {
        "forward": palette.PHASES["F"],
        "backward": palette.PHASES["B"],
        "recomputation": ("#bcbddc", "#dadaeb"),
        "optimizer": ("#a1d99b", "#c7e9c0"),
        "FETCH": ("#8a8a8a", "#9c9c9c"),
        "REDUCE_GRAD": ("#4d4d4d", "#5f5f5f"),
    },
}


def draw_page(
    plan: Mapping[str, Any] | None = None,
    spans: Sequence[StepSpan] = (),
    search: Mapping[str, Any] | None = None,
    *,
    title: str = "titanlite plan",
) -> str:
    """The page of a plan (the values of report.figures), of its spans, and of a search.

    `search` has `plans`, each with `changes` (section.key -> value), `tokens_per_second` of a rank,
    `seconds`, `peak_bytes`, and if known `mfu`, `bubble` and `bound`. It may have `memory_bytes` of
    the device, `num_candidates`, `is_complete` and `dropped` (reason -> number of plans).
    """
    rows, names = _rows(spans)
    data = {"plan": plan, "search": search, "rows": rows, "names": names, "colors": COLORS}
    return make_page(FOLDER / "page", title, data)


def _rows(spans: Sequence[StepSpan]) -> tuple[list[dict[str, Any]], list[str]]:
    """The spans by rank and stream, in nanoseconds; names and kinds are indices of a list."""
    number_of: dict[str, int] = {}
    rows: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for one in spans:
        # Sends and receives run at the same time, and so do copies to and from the device.
        stream = f"{one.stream} {one.kind}" if one.kind in BOTH_WAYS else one.stream
        name = number_of.setdefault(one.name, len(number_of))
        kind = number_of.setdefault(one.kind, len(number_of))
        times = round(1e9 * one.start), round(1e9 * one.end)
        rows.setdefault((one.rank, stream), []).append((*times, name, kind, one.microbatch or 0))
    found = [
        {"rank": rank, "stream": stream, "is_main": stream == MAIN, "spans": of_row}
        for (rank, stream), of_row in rows.items()
    ]
    return found, list(number_of)
