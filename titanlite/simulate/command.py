"""`titanlite simulate`: run schemes from the command line; print and draw the results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titanlite.simulate.costs import Costs
from titanlite.simulate.network import Link, Network
from titanlite.simulate.output import write as _write
from titanlite.simulate.priority import PRIORITIES
from titanlite.simulate.result import Simulation
from titanlite.simulate.schemes import STRATEGIES, Workload, run_scheme
from titanlite.simulate.table import format_table, html_table
from titanlite.simulate.work import SimulationError


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Raises TitanliteError if the scheme cannot be simulated.
    """
    if list(arguments[:1]) == ["ladder"]:
        from titanlite.simulate.ladder.command import main as ladder

        return ladder(arguments[1:])
    options = _parser().parse_args(arguments)
    if options.compare and options.scheme is None:
        options.scheme = options.compare.pop(0)
    if options.scheme is None:
        raise SimulationError("no scheme given; name one, or `ladder` (--help lists them)")
    if options.scheme == "ladder":
        raise SimulationError("ladder has options of its own; put it first: simulate ladder ...")
    simulations = [
        run_scheme(scheme, _workload(options)) for scheme in (options.scheme, *options.compare)
    ]
    _show(simulations, options)
    return 0


def _show(simulations: Sequence[Simulation], options: argparse.Namespace) -> None:
    from titanlite.drawing.schedule_text import draw_text

    longest = max(simulation.makespan for simulation in simulations)
    timelines = [replace(simulation.timeline(), until=longest) for simulation in simulations]
    rows = [_figures(simulation) for simulation in simulations]
    if not options.quiet:
        for timeline in timelines:
            print(draw_text(timeline, options.width, options.color), end="\n\n")
    print(format_table(HEADER, rows, left=("scheme",)))
    if options.svg:
        from titanlite.drawing.schedule_svg import draw_svg

        _write(options.svg, draw_svg(*timelines))
    if options.html:
        from titanlite.drawing.schedule_html import draw_html

        _write(options.html, draw_html(timelines, html_table(HEADER, rows)))
    for option, extension in (("png", ".png"), ("trace", ".json")):
        path = getattr(options, option)
        for timeline in timelines if path else ():
            # One picture per file; with several schemes, the name of each goes into its file name.
            name = "".join(c if c.isalnum() else "_" for c in timeline.title)
            stem = f"{Path(path).stem}_{name}" if len(timelines) > 1 else Path(path).stem
            target = Path(path).with_name(stem + (Path(path).suffix or extension))
            if option == "png":
                from titanlite.drawing.schedule_png import draw_png

                target.parent.mkdir(parents=True, exist_ok=True)
                draw_png(timeline, target)
                print(f"wrote {target}")
            else:
                from titanlite.schedule.trace import make_trace

                _write(target, make_trace(timeline))


HEADER = (
    "scheme",
    "stages",
    "makespan",
    "lower bound",
    "bubble",
    "batches/time",
    "peak held",
    "sent",
    "fetched",
    "stored",
)


def _figures(simulation: Simulation) -> list[str]:
    return [
        simulation.title,
        str(simulation.num_stages),
        f"{simulation.makespan:g}",
        f"{simulation.lower_bound:g}",
        f"{simulation.bubble_fraction:.1%}",
        f"{simulation.throughput:.3g}",
        str(max(simulation.peak_activations)),
        str(max(simulation.activation_transmissions)),
        str(max(simulation.weight_transmissions)),
        str(max(simulation.weight_storage)),
    ]


def _workload(options: argparse.Namespace) -> Workload:
    network = None
    sends = (options.latency, options.time_per_unit, options.inside_latency)
    if any(sends) or options.inside_time_per_unit or options.reduce_gradients:
        between = Link(options.latency, options.time_per_unit)
        inside = None
        if options.inside_latency is not None or options.inside_time_per_unit is not None:
            inside = Link(options.inside_latency or 0.0, options.inside_time_per_unit or 0.0)
        network = Network(between, inside, options.workers_per_node)
    costs = Costs(
        forward=_per_stage(options.forward),
        backward=_per_stage(options.backward),
        weight_gradient=_per_stage(options.weight_gradient) if options.weight_gradient else None,
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
        max_in_flight=_in_flight(options.max_in_flight, options.workers),
        split_backward=options.split_backward,
        costs=costs,
    )


def _per_stage(values: list[float]) -> float | list[float]:
    return values[0] if len(values) == 1 else values


def _in_flight(values: list[int] | None, workers: int) -> int | list[int] | None:
    if values is None or len(values) == 1:
        return values and values[0]
    return values


def _number(text: str) -> float:
    """An int if `text` is a whole number, so that times print without a fraction."""
    value = float(text)
    return int(value) if value == int(value) else value


def _parser() -> argparse.ArgumentParser:
    from titanlite.schedule import SCHEDULES

    parser = argparse.ArgumentParser(
        prog="titanlite simulate",
        usage="titanlite simulate SCHEME [--compare SCHEME ...] [options]\n"
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

    size = parser.add_argument_group("size")
    size.add_argument("--workers", type=int, default=4, metavar="N")
    size.add_argument("--batches", type=int, default=8, metavar="N", help="(micro)batches")
    size.add_argument(
        "--stages", type=int, metavar="N", help="default: the fewest the scheme allows"
    )
    size.add_argument(
        "--group-size", type=int, metavar="N", help="workers per group of a looped pipeline"
    )

    order = parser.add_argument_group("order of a strategy")
    order.add_argument("--priority", choices=list(PRIORITIES))
    order.add_argument(
        "--max-in-flight", type=int, nargs="+", metavar="N", help="one value, or one per worker"
    )
    order.add_argument(
        "--split-backward",
        action="store_true",
        help="schedule weight gradients separately from input gradients",
    )

    costs = parser.add_argument_group("costs (one value, or one per stage)")
    costs.add_argument("--forward", type=_number, nargs="+", default=[1], metavar="TIME")
    costs.add_argument("--backward", type=_number, nargs="+", default=[2], metavar="TIME")
    costs.add_argument(
        "--weight-gradient",
        type=_number,
        nargs="+",
        metavar="TIME",
        help="part of the backward time (default: half)",
    )
    costs.add_argument("--activation-units", type=_number, default=0, metavar="SIZE")
    costs.add_argument("--weight-units", type=_number, default=0, metavar="SIZE", help="per stage")

    network = parser.add_argument_group("network")
    network.add_argument("--latency", type=_number, default=0, metavar="TIME")
    network.add_argument("--time-per-unit", type=_number, default=0, metavar="TIME")
    network.add_argument("--workers-per-node", type=int, default=1, metavar="N")
    network.add_argument("--inside-latency", type=_number, metavar="TIME", help="inside a node")
    network.add_argument("--inside-time-per-unit", type=_number, metavar="TIME")
    network.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="a worker cannot compute while it sends",
    )
    network.add_argument(
        "--prefetch", type=int, default=1, metavar="N", help="fetch weights N work items ahead"
    )
    network.add_argument("--reduce-gradients", action="store_true")

    output = parser.add_argument_group("output")
    output.add_argument("--svg", metavar="FILE")
    output.add_argument("--html", metavar="FILE", help="a page with tooltips and zoom")
    output.add_argument("--png", metavar="FILE", help="needs matplotlib")
    output.add_argument("--trace", metavar="FILE", help="for https://ui.perfetto.dev")
    output.add_argument("--width", type=int, metavar="CHARACTERS")
    output.add_argument("--color", action=argparse.BooleanOptionalAction, default=None)
    output.add_argument("--quiet", action="store_true", help="print only the table")
    return parser
