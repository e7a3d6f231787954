"""The figures of simulations as rows of a table and of a CSV file."""

import csv
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any, NamedTuple

from titanlite.tools.simulate.costs import Costs
from titanlite.tools.simulate.exact import Time
from titanlite.tools.simulate.quantity import show_rate, show_size, show_time
from titanlite.tools.simulate.result import Simulation


class Column(NamedTuple):
    """A figure: its name, how it is computed, and how it is shown (value, costs)."""

    name: str
    value: Callable[[Simulation], Time]
    show: Callable[[Any, Costs], str] = lambda value, _: str(value)


def _time(value: Time, costs: Costs) -> str:
    return show_time(value, costs.time_unit)


def _size(value: Time, costs: Costs) -> str:
    return show_size(value, costs.size_unit)


PEAK_MEMORY = Column("peak memory", lambda s: max(s.peak_memory), _size)
COLUMNS = (
    Column("stages", lambda s: s.num_stages),
    Column("makespan", lambda s: s.makespan, _time),
    Column("lower bound", lambda s: s.lower_bound, _time),
    Column("bubble", lambda s: s.bubble_fraction, lambda value, _: f"{float(value):.1%}"),
    Column("batches/time", lambda s: s.throughput, lambda v, costs: show_rate(v, costs.time_unit)),
    Column("peak held", lambda s: max(s.peak_activations)),
    PEAK_MEMORY,
    Column("sent", lambda s: max(s.activation_transmissions)),
    Column("fetched", lambda s: max(s.weight_transmissions)),
    Column("stored", lambda s: max(s.weight_storage)),
)


class Row(NamedTuple):
    """The figures of one simulation, by name, and the costs whose units they are in."""

    values: dict[str, Any]
    costs: Costs


def figures(simulation: Simulation) -> dict[str, Time]:
    """The figures of a simulation, by the names of COLUMNS; memory only where there are sizes."""
    has_sizes = simulation.costs.has_sizes
    return {c.name: c.value(simulation) for c in COLUMNS if c is not PEAK_MEMORY or has_sizes}


def table_rows(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of a table of `rows`."""
    shown = {column.name: column.show for column in COLUMNS}
    header = names_of([row.values for row in rows])
    cells = []
    for values, costs in rows:
        texts = {k: shown[k](v, costs) if k in shown else str(v) for k, v in values.items()}
        cells.append([texts.get(name, "") for name in header])
    return header, cells


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def names_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of all rows, in the order of the row that has most."""
    longest = max(rows, key=len)
    return [*longest, *dict.fromkeys(key for row in rows for key in row if key not in longest)]


def write_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of a CSV file of `rows`, which have the same keys; numbers are not rounded."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        name.replace(" ", "_").replace("/", "_per_").replace("-", "_") for name in rows[0]
    )
    for row in rows:
        # Spreadsheets do not read a Fraction, such as 1/3.
        writer.writerow(v if isinstance(v, int | str) else float(v) for v in row.values())
    return text.getvalue()
