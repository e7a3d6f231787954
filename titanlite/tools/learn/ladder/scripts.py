"""Run the script of a rung: titanlite ladder 2d-pp [--dp 4 --items 32 ...].

It draws what every rank does, and prints what the rung costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from math import prod

from titanlite.errors import suggest
from titanlite.mesh.parallel_dims import Grid
from titanlite.schedule.walk import Span
from titanlite.tools.figures.schedule_text import draw_text
from titanlite.tools.learn.ladder.command import FILES, add_arguments, make_network, make_workload
from titanlite.tools.learn.ladder.rungs import (
    RUNGS,
    Measured,
    Rung,
    ladder_table,
    run_program,
    run_rung,
)
from titanlite.tools.options import fitted
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.options import Parser, characters, check_outputs, write_timelines
from titanlite.tools.simulate.train_step import Outcome, StepWorkload
from titanlite.tools.simulate.work import SimulationError

Train = Callable[[GPU, Grid, StepWorkload], Outcome]

# What is typed -> the script's module, and the name of its rung in the table.
SCRIPTS = {
    "0d": ("rung_0d", "0D"),
    "1d-relay": ("rung_1d_dp_relay", "1D DP, relay"),
    "1d": ("rung_1d_dp", "1D DP, ring"),
    "1d-overlap": ("rung_1d_dp_overlap", "1D DP, overlap"),
    "2d-pp": ("rung_2d_dp_pp", "2D DP x PP"),
    "2d-tp": ("rung_2d_dp_tp", "2D DP x TP"),
    "3d": ("rung_3d", "3D DP x PP x TP"),
    "4d-cp": ("rung_4d_cp", "4D with CP"),
    "4d-ep": ("rung_4d_ep", "4D with EP"),
}

USAGE = f"""\
usage: titanlite ladder RUNG [options]

Runs the script of one rung on simulated GPUs: draws what every rank does, checks the result, and
prints what the rung gains and costs. RUNG is one of {", ".join(SCRIPTS)};
2d and 4d run both of theirs. The scripts are titanlite/tools/learn/ladder/rung_*.py.
`RUNG --help` lists the options: degrees, workload, network. `titanlite simulate ladder` prints the
table of all rungs."""


def main(arguments: Sequence[str]) -> int:
    """Run the scripts that the first argument names, and return the exit status.

    Raises SimulationError.
    """
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(fitted(USAGE))
        return 0
    chosen = [name] if name in SCRIPTS else [n for n in SCRIPTS if n.startswith(f"{name}-")]
    if not chosen:
        every = f"choose from {', '.join(SCRIPTS)}"
        raise SimulationError(f"no rung {name!r}; {suggest(name, [*SCRIPTS, '--help'], every)}")
    texts: list[str] = []
    for number, each in enumerate(chosen):
        module, rung = SCRIPTS[each]
        train = import_module(f"titanlite.tools.learn.ladder.{module}").train
        print(end="\n\n" * (number > len(texts)))
        with suppress(SystemExit):  # its help is printed
            texts.append(describe(rung, train, each, options))
    print("\n\n\n".join(texts), end="\n" * bool(texts))
    return 0


def describe(name: str, train: Train, typed: str, arguments: Sequence[str]) -> str:
    """Run `train(gpu, grid, workload)` on every rank of the rung `name`; returns what to print.

    `typed` and `arguments` are of the command line. Raises SimulationError, also for wrong results.
    """
    rung = next(rung for rung in RUNGS if rung.name == name)
    parser = Parser(prog=f"titanlite ladder {typed}", description=f"The script of the rung {name}.")
    add_arguments(parser, list(rung.degrees))
    output = parser.add_argument_group("output")
    output.add_argument("--columns", type=characters, metavar="N", help="characters in a line")
    output.add_argument("--svg", metavar="FILE")
    output.add_argument("--html", metavar="FILE", help="a page with tooltips and zoom")
    options = parser.parse_args(arguments)
    check_outputs(options, FILES)
    degrees = {axis: getattr(options, axis) or rung.degrees[axis] for axis in rung.degrees}
    rung = replace(rung, degrees=degrees)
    workload, network = make_workload(options), make_network(options)
    measured, cluster = run_program(
        lambda gpu: train(gpu, rung.grid, workload), rung, workload, network
    )
    rows: list[Measured] = [] if name == "0D" else [run_rung(RUNGS[0], workload, network)[0]]
    if rung.below not in (None, "0D"):
        below = next(each for each in RUNGS if each.name == rung.below)
        rows.append(run_rung(_with_degrees(below, degrees), workload, network)[0])
    drawn = cluster.timeline(name)
    # In text, the end of overlapped messages is a part of the row, as other messages are.
    exposed = [
        Span(gpu.global_rank, event.start, event.end, "SEND")
        for gpu in cluster.gpus
        for event in gpu.events
        if event.kind == "join"
    ]
    caption = (
        "F, B: forward and backward of a part of a layer; colours: microbatches; "
        "-: messages; .: waiting"
    )
    timeline = replace(drawn, caption=caption)
    wrote = write_timelines(options, [timeline])
    return "\n\n".join(
        [
            draw_text(replace(timeline, spans=[*drawn.spans, *exposed]), options.columns),
            f"All losses, gradients and new weights\nof {workload.items} items equal a single "
            "process's. The rung, and those below it:",
            "\n".join([ladder_table([*rows, measured]), *wrote]),
        ]
    )


def _with_degrees(below: Rung, degrees: dict[str, int]) -> Rung:
    """The rung below with the same degrees where it has the axis; DP alone has as many ranks."""
    if below.degrees.keys() == {"dp"}:
        return replace(below, degrees={"dp": prod(degrees.values())})
    return replace(below, degrees={axis: degrees[axis] for axis in below.degrees})
