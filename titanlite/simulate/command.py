"""`titanlite simulate`: run schemes from the command line; print and draw the results."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.simulate.costs import Costs
from titanlite.simulate.figures import figures, table_rows, write_csv
from titanlite.simulate.network import Link, Network
from titanlite.simulate.options import (
    Parser,
    characters,
    check_outputs,
    check_used,
    number,
    used_options,
    whole,
)
from titanlite.simulate.output import write as _write
from titanlite.simulate.output import write_with as _write_with
from titanlite.simulate.priority import PRIORITIES
from titanlite.simulate.result import Simulation
from titanlite.simulate.schemes import STRATEGIES, Workload, run_scheme
from titanlite.simulate.sweep import Point, read_axes
from titanlite.simulate.table import format_table, html_table
from titanlite.simulate.work import SimulationError

if TYPE_CHECKING:
    from titanlite.schedule.timeline import Timeline

FILES = {"svg": ".svg", "html": ".html", "png": ".png", "csv": ".csv", "trace": ".json"}
# Of these, an option has one value, or one per stage or worker; a sweep gives one.
LISTED_OPTIONS = ("forward", "backward", "weight_gradient", "max_in_flight")
SWEPT_OPTIONS = (
    *("workers", "batches", "stages", "group_size", "priority", *LISTED_OPTIONS),
    *("activation_units", "weight_units", "prefetch", "latency", "time_per_unit"),
    *("workers_per_node", "inside_latency", "inside_time_per_unit"),
)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises TitanliteError if the scheme cannot be simulated.
    """
    if list(arguments[:1]) == ["ladder"]:
        from titanlite.simulate.ladder.command import main as ladder

        return ladder(arguments[1:])
    parser = _parser()
    options, given = parser.parse(arguments)
    if options.compare and options.scheme is None:
        options.scheme = options.compare.pop(0)
    if options.scheme is None:
        raise SimulationError("no scheme given; name one, or `ladder` (--help lists them)")
    check_outputs(options, FILES)
    if options.scheme == "ladder":
        raise SimulationError("ladder has options of its own; put it first: simulate ladder ...")
    schemes = [options.scheme, *options.compare]
    if options.sweep:
        return _sweep(schemes, options, given, parser)
    if options.quiet and ("width" in given or "color" in given):
        option = given.get("width", given.get("color"))
        raise SimulationError(f"{option}: --quiet draws no picture in the terminal")
    simulations = [run_scheme(scheme, _workload(options)) for scheme in schemes]
    check_used(given, set().union(*map(used_options, simulations)), schemes)
    for scheme, simulation in zip(schemes, simulations, strict=True):
        _check_file_sizes(scheme, simulation, options, given)
    _show(simulations, options)
    return 0


def _check_file_sizes(
    scheme: str, simulation: Simulation, options: argparse.Namespace, given: Mapping[str, str]
) -> None:
    """Raise SimulationError if a schedule from a file has other sizes than the options give."""
    if not scheme.endswith(".csv"):
        return
    sizes = {
        "workers": simulation.num_workers,
        "stages": simulation.num_stages,
        "batches": simulation.num_batches,
    }
    for name, size in sizes.items():
        if name in given and getattr(options, name) != size:
            raise SimulationError(
                f"--{name}: {scheme} has {size} {name}, not {getattr(options, name)}"
            )


def _row(scheme: str, simulation: Simulation) -> dict[str, Any]:
    """The scheme, the sizes and the figures of a simulation."""
    sizes = {"workers": simulation.num_workers, "batches": simulation.num_batches}
    return {"scheme": scheme, **sizes, **figures(simulation)}


def _show(simulations: Sequence[Simulation], options: argparse.Namespace) -> None:
    rows = [_row(simulation.title, simulation) for simulation in simulations]
    header, cells = table_rows(
        [{k: v for k, v in row.items() if k not in ("workers", "batches")} for row in rows]
    )
    timelines: list[Timeline] = []
    if not options.quiet or options.svg or options.html or options.png or options.trace:
        longest = float(max(simulation.makespan for simulation in simulations))
        timelines = [replace(simulation.timeline(), until=longest) for simulation in simulations]
    if not options.quiet:
        from titanlite.drawing.schedule_text import draw_text

        for timeline in timelines:
            print(draw_text(timeline, options.width, options.color), end="\n\n")
    print(format_table(header, cells, left=("scheme",)))
    if options.csv:
        _write(options.csv, write_csv(rows))
    if options.svg:
        from titanlite.drawing.schedule_svg import draw_svg

        _write(options.svg, draw_svg(*timelines))
    if options.html:
        from titanlite.drawing.schedule_html import draw_html

        _write(options.html, draw_html(timelines, html_table(header, cells)))
    for path in (options.png, options.trace):
        for timeline in timelines if path else ():
            # One picture per file; with several schemes, the name of each goes into its file name.
            name = "".join(c if c.isalnum() else "_" for c in timeline.title)
            stem = f"{Path(path).stem}_{name}" if len(timelines) > 1 else Path(path).stem
            target = Path(path).with_name(stem + Path(path).suffix)
            if path == options.png:
                from titanlite.drawing.schedule_png import draw_png

                _write_with(target, partial(draw_png, timeline))
            else:
                from titanlite.schedule.trace import make_trace

                _write(target, make_trace(timeline))


def _sweep(
    schemes: Sequence[str],
    options: argparse.Namespace,
    given: Mapping[str, str],
    parser: Parser,
) -> int:
    """Run a grid; returns 130 if Ctrl-C has ended it."""
    from titanlite.simulate.sweep_report import (
        csv_of_sweep,
        draw_sweep,
        run_with_progress,
        show_sweep,
    )

    for name in ("html", "trace", "width", "color"):
        if name in given:
            raise SimulationError(
                f"{given[name]}: a sweep draws no timelines; leave it out (--svg or --png draws "
                "the sweep)"
            )
    readers = {name: parser.type_of(name) for name in SWEPT_OPTIONS}
    axes = read_axes(options.sweep, readers.get)
    for name in axes:
        if name in given:
            raise SimulationError(f"{given[name]}: --sweep gives its values; leave it out")
    used: set[str] = set()

    def run(scheme: str, point: Point) -> dict[str, Any]:
        values = {name: [v] if name in LISTED_OPTIONS else v for name, v in point.items()}
        workload = _workload(argparse.Namespace(**{**vars(options), **values}))
        simulation = run_scheme(scheme, workload)
        used.update(used_options(simulation))
        row = _row(scheme, simulation)
        return {**{name: row[name] for name in ("scheme", "workers", "batches")}, **point, **row}

    swept = run_with_progress(schemes, axes, run)
    if swept.is_complete:
        spelled = {name: f"--{name.replace('_', '-')}" for name in axes}
        check_used({**given, **spelled}, used, schemes)
    if not swept.rows:
        raise SimulationError("--sweep: interrupted before a point had run")
    print(show_sweep(swept, tuple(axes)))
    hint = "costs_per" not in given and "stages" not in (*given, *axes)
    if "workers" in axes and hint:
        print("A scheme has more stages on more workers; --costs-per model divides one model.")
    if options.csv:
        _write(options.csv, csv_of_sweep(swept, tuple(axes)))
    for path in filter(None, (options.svg, options.png)):
        title = f"{', '.join(schemes)}: {' '.join(options.sweep)}"
        _write_with(Path(path), partial(draw_sweep, swept, tuple(axes), title))
    return 0 if swept.is_complete else 130


def _workload(options: argparse.Namespace) -> Workload:
    network = None
    between = options.latency, options.time_per_unit
    inside = options.inside_latency, options.inside_time_per_unit
    if options.reduce_gradients or (*between, *inside) != (None,) * 4:
        network = Network(
            Link(*(time or 0 for time in between)),
            None if inside == (None, None) else Link(*(time or 0 for time in inside)),
            options.workers_per_node,
        )
    costs = Costs(
        forward=_one_or_all(options.forward),
        backward=_one_or_all(options.backward),
        weight_gradient=_one_or_all(options.weight_gradient),
        activation_units=options.activation_units,
        weight_units=options.weight_units,
        network=network,
        overlap_transfers=options.overlap,
        prefetch=options.prefetch,
        reduce_gradients=options.reduce_gradients,
    )
    return Workload(
        workers=options.workers,
        batches=options.batches,
        stages=options.stages,
        group_size=options.group_size,
        priority=options.priority,
        max_in_flight=_one_or_all(options.max_in_flight),
        split_backward=options.split_backward,
        costs=costs,
        costs_per=options.costs_per,
    )


def _one_or_all(values: list[Any] | None) -> Any:
    return values[0] if values is not None and len(values) == 1 else values


def _parser() -> Parser:
    from titanlite.schedule import SCHEDULES

    parser = Parser(
        prog="titanlite simulate",
        usage="titanlite simulate SCHEME [--compare SCHEME ...] [options]\n"
        "       titanlite simulate SCHEME --sweep workers=4,8,16 batches=8:64:8 [options]\n"
        "       titanlite simulate ladder [options]",
        description="Simulate a training scheme in virtual time, draw it, and report its cost.",
        epilog=f"strategies: {', '.join(STRATEGIES)}. schedules: {', '.join(SCHEDULES)}. "
        "Your own: FILE.py with strategy(work) -> ComputeAndWeightWorkers(compute, weight), "
        "FILE.py:FUNCTION, or a schedule as FILE.csv. `ladder` runs one workload with 0 to 4 "
        "dimensions of parallelism on simulated GPUs, and has options of its own "
        "(ladder --help).",
    )
    parser.add_argument("scheme", nargs="?", metavar="SCHEME")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="SCHEME", help="more schemes to run"
    )

    parser.add_argument(
        "--sweep",
        nargs="+",
        metavar="OPTION=VALUES",
        help="run a grid: values and ranges FIRST:LAST:STEP (with LAST) of options",
    )

    size = parser.add_argument_group("size")
    size.add_argument("--workers", type=whole, default=4, metavar="N")
    size.add_argument("--batches", type=whole, default=8, metavar="N", help="(micro)batches")
    size.add_argument(
        "--stages", type=whole, metavar="N", help="default: the fewest the scheme allows"
    )
    size.add_argument(
        "--group-size", type=whole, metavar="N", help="workers per group of a looped pipeline"
    )

    order = parser.add_argument_group("order of a strategy")
    order.add_argument("--priority", choices=list(PRIORITIES))
    order.add_argument(
        "--max-in-flight", type=whole, nargs="+", metavar="N", help="one value, or one per worker"
    )
    order.add_argument(
        "--split-backward",
        action="store_true",
        help="schedule weight gradients separately from input gradients",
    )

    costs = parser.add_argument_group("costs (one value, or one per stage)")
    costs.add_argument(
        "--costs-per",
        choices=["stage", "model"],
        default="stage",
        help="model: times and weights are of the whole model, divided among its stages",
    )
    costs.add_argument("--forward", type=number, nargs="+", default=[1], metavar="TIME")
    costs.add_argument("--backward", type=number, nargs="+", default=[2], metavar="TIME")
    costs.add_argument(
        "--weight-gradient",
        type=number,
        nargs="+",
        metavar="TIME",
        help="part of the backward time (default: half)",
    )
    costs.add_argument("--activation-units", type=number, default=0, metavar="SIZE")
    costs.add_argument("--weight-units", type=number, default=0, metavar="SIZE", help="per stage")

    network = parser.add_argument_group("network")
    network.add_argument("--latency", type=number, metavar="TIME")
    network.add_argument("--time-per-unit", type=number, metavar="TIME")
    network.add_argument("--workers-per-node", type=whole, default=1, metavar="N")
    network.add_argument("--inside-latency", type=number, metavar="TIME", help="inside a node")
    network.add_argument("--inside-time-per-unit", type=number, metavar="TIME")
    network.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="a worker cannot compute while it sends",
    )
    network.add_argument(
        "--prefetch", type=whole, default=1, metavar="N", help="fetch weights N work items ahead"
    )
    network.add_argument("--reduce-gradients", action="store_true")

    output = parser.add_argument_group("output")
    output.add_argument("--svg", metavar="FILE")
    output.add_argument("--html", metavar="FILE", help="a page with tooltips and zoom")
    output.add_argument("--png", metavar="FILE", help="needs matplotlib")
    output.add_argument("--csv", metavar="FILE", help="the table, numbers not rounded")
    output.add_argument("--trace", metavar="FILE", help="for https://ui.perfetto.dev")
    output.add_argument("--width", type=characters, metavar="CHARACTERS")
    output.add_argument("--color", action=argparse.BooleanOptionalAction, default=None)
    output.add_argument("--quiet", action="store_true", help="print only the table")
    return parser
