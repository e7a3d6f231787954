"""Run the script of a rung: draw what every rank does, and print what the rung costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from titanlite.mesh.parallel_dims import Grid
from titanlite.schedule.timeline import Span
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
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.options import Parser, characters, check_outputs, write_timelines
from titanlite.tools.simulate.train_step import Outcome, StepWorkload

Train = Callable[[GPU, Grid, StepWorkload], Outcome]


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
