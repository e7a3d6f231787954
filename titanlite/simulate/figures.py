"""The figures of simulations as rows of a table and of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any, NamedTuple

from titanlite.simulate.exact import Time
from titanlite.simulate.result import Simulation


class Column(NamedTuple):
    """A figure: its name, how it is computed, and how it is shown."""

    name: str
    value: Callable[[Simulation], Time]
    show: Callable[[Any], str]


def _general(value: Time) -> str:
    return f"{float(value):g}"


COLUMNS = (
    Column("stages", lambda s: s.num_stages, str),
    Column("makespan", lambda s: s.makespan, _general),
    Column("lower bound", lambda s: s.lower_bound, _general),
    Column("bubble", lambda s: s.bubble_fraction, lambda value: f"{float(value):.1%}"),
    Column("batches/time", lambda s: s.throughput, lambda value: f"{float(value):.3g}"),
    Column("peak held", lambda s: max(s.peak_activations), str),
    Column("sent", lambda s: max(s.activation_transmissions), str),
    Column("fetched", lambda s: max(s.weight_transmissions), str),
    Column("stored", lambda s: max(s.weight_storage), str),
)


def figures(simulation: Simulation) -> dict[str, Time]:
    """The figures of a simulation, by the names of COLUMNS."""
    return {column.name: column.value(simulation) for column in COLUMNS}


def table_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of a table of `rows`, which have the same keys."""
    shown = {column.name: column.show for column in COLUMNS}
    header = list(rows[0])
    return header, [[shown.get(name, str)(value) for name, value in row.items()] for row in rows]


def write_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of a CSV file of `rows`, which have the same keys; numbers are not rounded."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        name.replace(" ", "_").replace("/", "_per_").replace("-", "_") for name in rows[0]
    )
    for row in rows:
        writer.writerow(_plain(value) for value in row.values())
    return text.getvalue()


def _plain(value: Any) -> Any:
    """A Fraction as a float: spreadsheets do not read 1/3."""
    return value if isinstance(value, int | str) else float(value)
