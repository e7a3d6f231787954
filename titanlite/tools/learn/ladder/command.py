"""`titanlite simulate ladder`: the table of rungs, for any workload, degrees and network."""

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from math import lcm

from titanlite.observe.terminal import folded
from titanlite.tools.learn.ladder.rungs import (
    CLIMB,
    RUNGS,
    Rung,
    check_runs,
    ladder_table,
    make_rungs,
    run_rung,
)
from titanlite.tools.options import positive
from titanlite.tools.simulate.exact import exact
from titanlite.tools.simulate.gpu import ETHERNET
from titanlite.tools.simulate.network import Link, Network
from titanlite.tools.simulate.options import Parser, check_outputs, factor, number, write_timelines
from titanlite.tools.simulate.train_step import StepWorkload
from titanlite.tools.simulate.work import SimulationError

FILES = {"svg": (".svg",), "html": (".html",)}

AXES = {
    "dp": "data parallel",
    "pp": "pipeline stages",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status. Raises SimulationError for bad arguments."""
    options = _parser().parse_args(arguments)
    check_outputs(options, FILES)
    rungs = _rungs(options)
    workload, network = make_workload(options), make_network(options)
    for rung in rungs:
        check_runs(rung, workload)
    runs = [run_rung(rung, workload, network, options.sleep) for rung in rungs]
    timelines = [
        replace(cluster.timeline(measured.rung.name), caption=f"{measured.seconds:.1f} s")
        for measured, cluster in runs
    ]
    wrote = write_timelines(options, timelines)
    if not options.quiet:
        what = "all losses, gradients and new weights equal a single process's"
        print(folded(f"{workload.items} items; {what}; times in virtual seconds:", sys.stdout))
    print("\n".join([ladder_table([measured for measured, _ in runs]), *wrote]))
    return 0


def _rungs(options: argparse.Namespace) -> list[Rung]:
    """The standard rungs, or those up to the degrees given, with the options applied to all."""
    degrees = {axis: getattr(options, axis) for axis in CLIMB if getattr(options, axis) is not None}
    if degrees:
        return make_rungs(degrees, overlap=options.overlap, microbatch_items=options.microbatch)
    rungs = [replace(rung, overlap=rung.overlap or options.overlap) for rung in RUNGS]
    if options.microbatch == 1:
        return rungs
    return [replace(rung, microbatch_items=options.microbatch) for rung in rungs]


def make_workload(options: argparse.Namespace) -> StepWorkload:
    """The workload given by the options of `add_arguments`; what is not given has its default.

    The default width and number of tokens are multiples of the degrees that divide them.
    """
    given = {each.name: getattr(options, each.name) for each in fields(StepWorkload)}
    for name, axis in (("tokens", "cp"), ("width", "tp")):
        if given[name] is None:
            given[name] = lcm(getattr(StepWorkload, name), getattr(options, axis, None) or 1)
    return StepWorkload(**{name: value for name, value in given.items() if value is not None})


def make_network(options: argparse.Namespace) -> Network:
    """The network given by the options of `add_arguments`."""
    between = Link(options.latency, options.time_per_unit)
    if options.workers_per_node == 1:
        if options.inside_speedup is not None:
            raise SimulationError("--inside-speedup: needs nodes; give --workers-per-node too")
        return Network(between)
    faster = exact(options.inside_speedup or 10, "--inside-speedup")
    inside = Link(
        exact(between.latency_seconds, "--latency") / Fraction(faster),
        exact(between.seconds_per_unit, "--time-per-unit") / Fraction(faster),
    )
    return Network(between, inside, options.workers_per_node)


def add_arguments(parser: argparse.ArgumentParser, axes: Collection[str] = CLIMB) -> None:
    """The options that the ladder and the scripts of its rungs share: size, degrees, network."""
    add = parser.add_argument_group("degrees").add_argument
    for axis in axes:
        add(f"--{axis}", type=positive, metavar="N", help=AXES[axis])
    add = parser.add_argument_group("workload").add_argument
    for each in fields(StepWorkload):
        is_count = isinstance(each.default, int) and "units" not in each.name
        name, default = f"--{each.name.replace('_', '-')}", f"default: {each.default}"
        kind, unit = (positive, "N") if is_count else (number, "UNITS")
        add(name, type=kind, metavar=unit, help=default)
    add = parser.add_argument_group("network").add_argument
    link = ETHERNET.between
    add("--latency", type=number, default=link.latency_seconds, metavar="SECONDS", help="a message")
    add("--time-per-unit", type=number, default=link.seconds_per_unit, metavar="SECONDS")
    add("--workers-per-node", type=positive, default=1, metavar="N")
    faster = "how much faster links inside a node are (default: 10)"
    add("--inside-speedup", type=factor, metavar="FACTOR", help=faster)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="titanlite simulate ladder",
        description="Run one training step with 0 to 4 dimensions of parallelism on simulated "
        "GPUs, and show what each dimension gains and costs. With degrees, such as --dp 4 --tp 2, "
        "the ladder adds these dimensions one after the other.",
    )
    add_arguments(parser)
    add = parser.add_argument_group("step").add_argument
    add("--overlap", action="store_true", help="sum gradients during the last backward pass")
    add(
        "--microbatch",
        type=lambda text: None if text == "all" else positive(text),
        default=1,
        metavar="N",
        help="items per microbatch (default: 1), or `all` items of a rank",
    )
    add = parser.add_argument_group("output").add_argument
    add("--svg", metavar="FILE")
    add("--html", metavar="FILE", help="a page with tooltips and zoom")
    add("--quiet", action="store_true", help="print only the table")
    add("--sleep", action="store_true", help="run in real time")
    return parser
