"""`titanlite simulate`: run schemes from the command line; print and draw the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from titanlite.observe.terminal import terminal_width
from titanlite.tools.figures.schedule_text import draw_text
from titanlite.tools.figures.timeline import Timeline
from titanlite.tools.figures.trace import make_trace
from titanlite.tools.options import whole, write
from titanlite.tools.simulate.costs import Costs
from titanlite.tools.simulate.figures import Row, figures, html_table, table_rows, write_csv
from titanlite.tools.simulate.memory_report import draw_memory, show_memory
from titanlite.tools.simulate.network import Link, Network
from titanlite.tools.simulate.options import (
    Parser,
    characters,
    check_outputs,
    check_used,
    read_rate,
    read_size,
    read_time,
    read_units,
    used_options,
    write_timelines,
)
from titanlite.tools.simulate.priority import PRIORITIES
from titanlite.tools.simulate.result import Simulation
from titanlite.tools.simulate.schemes import STRATEGIES, Workload, run_scheme
from titanlite.tools.simulate.sweep import Point, read_axes
from titanlite.tools.simulate.work import SimulationError
from titanlite.tools.tables import format_table

FILES = {
    "svg": (".svg",),
    "html": (".html",),
    "png": (".png",),
    "csv": (".csv",),
    "trace": (".json",),
    "memory": (".png", ".svg"),
}
COMPUTE_TIMES = ("forward", "backward", "weight_gradient")
TIMES = (*COMPUTE_TIMES, "latency", "time_per_unit", "inside_latency", "inside_time_per_unit")
SIZES = ("activation_units", "weight_units", "gradient_units", "optimizer_units", "kept_units")
RATES = ("bandwidth", "inside_bandwidth")
# Of these, an option has one value, or one per stage or worker; a sweep gives one.
LISTED_OPTIONS = (*COMPUTE_TIMES, *SIZES[1:], "max_in_flight")
SWEPT_OPTIONS = (
    *("workers", "batches", "stages", "group_size", "priority", "max_in_flight", "prefetch"),
    *("workers_per_node", *TIMES, *SIZES, *RATES),
)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises TitanliteError if the scheme cannot be simulated.
    """
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
    if options.memory and not all(simulation.costs.has_sizes for simulation in simulations):
        raise SimulationError("--memory: nothing has a size; give --weight-units or others, too")
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


def _row(scheme: str, simulation: Simulation) -> Row:
    """The scheme, the sizes and the figures of a simulation."""
    sizes = {"workers": simulation.num_workers, "batches": simulation.num_batches}
    return Row({"scheme": scheme, **sizes, **figures(simulation)}, simulation.costs)


def _show(simulations: Sequence[Simulation], options: argparse.Namespace) -> None:
    rows = [_row(simulation.title, simulation) for simulation in simulations]
    shown = [
        Row({k: v for k, v in values.items() if k not in ("workers", "batches")}, costs)
        for values, costs in rows
    ]
    header, cells = table_rows(shown)
    timelines: list[Timeline] = []
    if not options.quiet or options.svg or options.html or options.png or options.trace:
        longest = max(simulation.makespan for simulation in simulations)
        drawn = (simulation.timeline(longest) for simulation in simulations)
        timelines = [replace(timeline, cells_show=options.label) for timeline in drawn]
    wrote = _write(simulations, timelines, rows, options, html_table(header, cells))
    if not options.quiet:
        for simulation, timeline in zip(simulations, timelines, strict=True):
            print(draw_text(timeline, options.width, options.color), end="\n\n")
            if simulation.costs.has_sizes:
                print(show_memory(simulation, options.width), end="\n\n")
    print(format_table(header, cells, left=("scheme",), width=terminal_width(sys.stdout, 0)))
    print("".join(f"{line}\n" for line in wrote), end="")


def _write(
    simulations: Sequence[Simulation],
    timelines: Sequence[Timeline],
    rows: Sequence[Row],
    options: argparse.Namespace,
    html: str,
) -> list[str]:
    """Write the files that are asked for; returns the lines about them."""
    wrote: list[str] = []
    if options.csv:
        wrote.append(write(options.csv, write_csv([row.values for row in rows])))
    wrote += write_timelines(options, timelines, html)
    # One picture per file; with several schemes, the name of each goes into its file name.
    for simulation in simulations if options.memory else ():
        target = _one_of(options.memory, simulation.title, len(simulations))
        wrote.append(write(target, partial(draw_memory, simulation)))
    named = list(zip((simulation.title for simulation in simulations), timelines, strict=False))
    for title, timeline in named if options.png else ():
        from titanlite.tools.figures.schedule_png import draw_png

        target = _one_of(options.png, title, len(timelines))
        wrote.append(write(target, partial(draw_png, timeline)))
    for title, timeline in named if options.trace else ():
        wrote.append(write(_one_of(options.trace, title, len(timelines)), make_trace(timeline)))
    return wrote


def _one_of(path: str, title: str, num_files: int) -> Path:
    """The name of one of several files: with its title."""
    name = "".join(c if c.isalnum() else "_" for c in title)
    stem = f"{Path(path).stem}_{name}" if num_files > 1 else Path(path).stem
    return Path(path).with_name(stem + Path(path).suffix)


def _sweep(
    schemes: Sequence[str], options: argparse.Namespace, given: Mapping[str, str], parser: Parser
) -> int:
    """Run a grid; returns 130 if Ctrl-C has ended it."""
    from titanlite.tools.simulate.sweep_report import (
        csv_of_sweep,
        draw_sweep,
        run_with_progress,
        show_sweep,
    )

    for name in ("html", "trace", "memory", "label", "width", "color"):
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

    def run(scheme: str, point: Point) -> Row:
        values = {name: [v] if name in LISTED_OPTIONS else v for name, v in point.items()}
        workload = _workload(argparse.Namespace(**{**vars(options), **values}))
        simulation = run_scheme(scheme, workload)
        used.update(used_options(simulation))
        values, costs = _row(scheme, simulation)
        first = {name: values[name] for name in ("scheme", "workers", "batches")}
        return Row({**first, **point, **{k: v for k, v in values.items() if k not in point}}, costs)

    swept = run_with_progress(schemes, axes, run)
    if swept.is_complete:
        spelled = {name: f"--{name.replace('_', '-')}" for name in axes}
        check_used({**given, **spelled}, used, schemes)
    if not swept.rows:
        raise SimulationError("--sweep: interrupted before a point had run")
    wrote = []
    if options.csv:
        wrote.append(write(options.csv, csv_of_sweep(swept, tuple(axes))))
    for path in filter(None, (options.svg, options.png)):
        title = f"{', '.join(schemes)}: {' '.join(options.sweep)}"
        wrote.append(write(Path(path), partial(draw_sweep, swept, tuple(axes), title)))
    print(show_sweep(swept, tuple(axes)))
    grows = not {"costs_per", "stages"} & {*given, *axes}
    if grows and "workers" in axes and not all(".py" in scheme for scheme in schemes):
        print("A scheme has more stages on more workers; --costs-per model divides one model.")
    print("".join(f"{line}\n" for line in wrote), end="")
    return 0 if swept.is_complete else 130


def _workload(options: argparse.Namespace) -> Workload:
    values, time_unit, size_unit = read_units(options, TIMES, SIZES, RATES)
    network = None
    between = values["latency"], values["time_per_unit"]
    inside = values["inside_latency"], values["inside_time_per_unit"]
    if options.reduce_gradients or (*between, *inside) != (None,) * 4:
        network = Network(
            Link(*(time or 0 for time in between)),
            None if inside == (None, None) else Link(*(time or 0 for time in inside)),
            options.workers_per_node,
        )
    given = {name: _one_or_all(values[name]) for name in (*COMPUTE_TIMES, *SIZES)}
    costs = Costs(
        **{name: value for name, value in given.items() if value is not None},
        network=network,
        overlap_transfers=options.overlap,
        prefetch=options.prefetch,
        reduce_gradients=options.reduce_gradients,
        fetch_contention=options.fetch_contention,
        time_unit=time_unit,
        size_unit=size_unit,
    )
    others = {
        each.name: getattr(options, each.name) for each in fields(Workload) if each.name != "costs"
    }
    others["max_in_flight"] = _one_or_all(options.max_in_flight)
    return Workload(**others, costs=costs)


def _one_or_all(values: Any) -> Any:
    return values[0] if isinstance(values, list) and len(values) == 1 else values


def _parser() -> Parser:
    from titanlite.schedule import SCHEDULES

    parser = Parser(
        prog="titanlite simulate",
        usage="titanlite simulate SCHEME [--compare SCHEME ...] [options]\n"
        "       titanlite simulate SCHEME --sweep workers=4,8,16 batches=8:64:8 [options]\n"
        "       titanlite simulate ladder [options]",
        description="Simulate a training scheme in virtual time, draw it, and report its cost.",
        epilog="A TIME may have the unit s, ms, us or ns, a SIZE B, KB, KiB, MB, MiB and so on, if "
        f"all have one. strategies: {', '.join(STRATEGIES)}. schedules: {', '.join(SCHEDULES)}. "
        "Your own: FILE.py with strategy(work) -> ComputeAndWeightWorkers(compute, weight), "
        "FILE.py:FUNCTION, or a schedule as FILE.csv. `ladder --help` has the options of ladder, "
        "which runs one workload with 0 to 4 dimensions of parallelism on simulated GPUs.",
    )
    add = parser.add_argument
    add("scheme", nargs="?", metavar="SCHEME", help="a strategy, schedule or file; listed below")
    add("--compare", nargs="+", default=[], metavar="SCHEME", help="more schemes to run")
    grid = "run a grid: values and ranges FIRST:LAST:STEP (with LAST) of options"
    add("--sweep", nargs="+", metavar="OPTION=VALUES", help=grid)

    add = parser.add_argument_group("size").add_argument
    add("--workers", type=whole, default=4, metavar="N", help="default: 4")
    add("--batches", type=whole, default=8, metavar="N", help="(micro)batches; default: 8")
    add("--stages", type=whole, metavar="N", help="default: the fewest the scheme allows")
    add("--group-size", type=whole, metavar="N", help="workers per group of a looped pipeline")

    add = parser.add_argument_group("order of a strategy").add_argument
    add("--priority", choices=list(PRIORITIES), help="what a worker runs first of what is ready")
    add("--max-in-flight", type=whole, nargs="+", metavar="N", help="one value, or one per worker")
    add("--split-backward", action="store_true", help="schedule weight gradients separately")

    costs = parser.add_argument_group("costs (a SIZE or TIME is one value, or one per stage)")
    add, of = costs.add_argument, ["stage", "model"]
    add("--costs-per", choices=of, default=of[0], help="model: divided among its stages")
    add("--forward", type=read_time, nargs="+", metavar="TIME", help="default: 1")
    add("--backward", type=read_time, nargs="+", metavar="TIME", help="default: 2")
    part = "part of the backward time (default: half)"
    add("--weight-gradient", type=read_time, nargs="+", metavar="TIME", help=part)
    add("--activation-units", type=read_size, metavar="SIZE", help="of a message")
    for name, purpose in (
        ("--weight-units", "weights of a stage"),
        ("--gradient-units", "gradients of a stage (default: as weights)"),
        ("--optimizer-units", "optimizer state of a stage"),
        ("--kept-units", "kept by a forward for its backward (default: a message)"),
    ):
        add(name, type=read_size, nargs="+", metavar="SIZE", help=purpose)

    add = parser.add_argument_group("network").add_argument
    add("--latency", type=read_time, metavar="TIME", help="of a message; default: 0")
    add("--time-per-unit", type=read_time, metavar="TIME", help="of sending a unit of data")
    add("--bandwidth", type=read_rate, metavar="RATE", help="instead of --time-per-unit: 50GB/s")
    add("--workers-per-node", type=whole, default=1, metavar="N", help="default: 1")
    add("--inside-latency", type=read_time, metavar="TIME", help="inside a node")
    add("--inside-time-per-unit", type=read_time, metavar="TIME")
    add("--inside-bandwidth", type=read_rate, metavar="RATE")
    alone = "a worker cannot compute while it sends"
    add("--no-overlap", dest="overlap", action="store_false", help=alone)
    add("--prefetch", type=whole, default=1, metavar="N", help="fetch weights N work items ahead")
    free = "a worker sends weights to any number of workers at once"
    add("--no-fetch-contention", dest="fetch_contention", action="store_false", help=free)
    add("--reduce-gradients", action="store_true", help="sum them over the workers of a stage")

    add = parser.add_argument_group("output").add_argument
    cells = "a cell shows its stage (default) or its batch, the microbatch of a pipeline"
    add("--label", choices=["stage", "batch"], default="stage", help=cells)
    add("--svg", metavar="FILE", help="the picture")
    add("--html", metavar="FILE", help="a page with tooltips and zoom")
    add("--png", metavar="FILE", help="the picture; of each scheme, one")
    add("--memory", metavar="FILE", help="memory of the workers, .png or .svg")
    add("--csv", metavar="FILE", help="the table, numbers not rounded")
    add("--trace", metavar="FILE", help="for https://ui.perfetto.dev")
    add("--width", type=characters, metavar="CHARACTERS", help="of the picture that is printed")
    add("--color", action=argparse.BooleanOptionalAction, default=None)
    add("--quiet", action="store_true", help="print only the table")
    return parser
