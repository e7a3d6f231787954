"""`titanlite plan`: what a job's step takes and how long it lasts, before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.config import ResolvedJob, resolve_job
from titanlite.config.load import override, read_job
from titanlite.errors import ConfigError
from titanlite.observe.first_screen import Fact, render_screen
from titanlite.observe.run_facts import run_facts
from titanlite.observe.terminal import tell, telling, terminal_width
from titanlite.tools.figures.mesh_drawing import draw_mesh
from titanlite.tools.figures.palette import uses_color
from titanlite.tools.figures.timeline import Timeline
from titanlite.tools.figures.trace import make_trace
from titanlite.tools.options import CommandParser, positive, say, write
from titanlite.tools.planner.advice import advise
from titanlite.tools.planner.cache import load_applied
from titanlite.tools.planner.hardware import Hardware, known_hardware, load_hardware
from titanlite.tools.planner.hf_job import hf_job
from titanlite.tools.planner.html import draw_page
from titanlite.tools.planner.planning import JobPlan, plan_job, plannable, resolve
from titanlite.tools.planner.report import figures, show, step_in_words
from titanlite.tools.planner.space import KEPT_TRAINING
from titanlite.tools.planner.spans import draw_schedules, make_timeline, read_trace, step_spans

PUBLISHED = "configs/plan/published/rows.toml"
# The facts of a job that depend on neither the machine nor the data.
OF_A_PLAN = ("model", "sequence", "dtype", "batch", "optimizer", "learning rate")
OF_ROWS = ("published", "json")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    if options.calibrate:
        from titanlite.tools.planner.calibrate import calibrate

        calibrate(options.calibrate)
        return 0
    if options.published:
        given = [name for name, value in vars(options).items() if value and name not in OF_ROWS]
        if given or rest:
            raise ConfigError(
                f"--published: its rows have all else; leave out {[*given, *rest][0]}"
            )
        from titanlite.tools.planner.published import compare

        print(compare(Path(options.published), options.json))
        return 0
    words, notes = _words(options)
    hardware = load_hardware(options.hardware) if options.hardware else None
    _refuse(options, hardware)
    if options.search:
        return _search(options, words, rest, hardware)
    measured = _read_measured(options.measured, options.svg)
    resolved, more = resolve([*words, *rest], hardware, options.ranks)
    notes += more
    config = resolved.config
    if options.tensors:
        with telling("tracing the model"):
            say("\n".join(_tensors(resolved)))
        return 0
    if options.svg and resolved.pipeline is None:
        raise ConfigError("--svg: the job has no pipeline to draw; write a page with --html")
    with telling("tracing a step of one rank of each pipeline stage"):
        plan = plan_job(resolved, hardware, is_compiled=config.compile.enable)
        plan.advice.extend(advise(plan, resolved))
        screen = _first_screen(resolved, plan)
    plan.notes.extend(notes)
    if options.json:
        write(options.json, json.dumps(figures(plan), indent=1))
    if options.html:
        page = draw_page(figures(plan), step_spans(plan), title=config.job.description)
        write(options.html, page)
    if options.trace or options.svg:
        timeline = make_timeline(step_spans(plan), plan.dims)
        if options.trace:
            write(options.trace, make_trace(timeline))
        if options.svg:
            write(options.svg, draw_schedules(timeline, measured, step_in_words(plan)))
    # Files first: what reads the output may close it early, as `head` does.
    width, color = terminal_width(sys.stdout), uses_color(sys.stdout)
    print(show(plan, screen=screen, width=width, color=color))
    return 0


def _refuse(options: argparse.Namespace, hardware: Hardware | None) -> None:
    """Raises ConfigError for an option that needs another one."""
    for option in ("trace", "svg"):
        if getattr(options, option) and hardware is None:
            raise ConfigError(f"--{option}: a step has no times without --hardware; give both")
    for option in ("best", "exhaustive"):
        if getattr(options, option) and not options.search:
            raise ConfigError(f"--{option}: only a search has it; give --search, too")


def _words(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The words that name the job, and notes."""
    if options.hf is not None:
        if options.job is not None:
            raise ConfigError(f"--hf: the job is {options.job}; leave out one of them")
        return hf_job(options.hf)
    if options.job is None:
        raise ConfigError("job: is missing; give the TOML file of the job, or --hf config.json")
    return [f"--job.config_file={options.job}"], []


def _parser() -> CommandParser:
    usage = "titanlite plan JOB.toml|--hf FILE [options] [--section.key=value ...]"
    parser = CommandParser("titanlite plan", usage, description=__doc__)
    add = parser.add_argument
    add("job", nargs="?", help="the TOML file of the job")
    add("--json", metavar="FILE", help="write all figures to a file")
    add("--hf", metavar="FILE", help="plan the model of a Hugging Face config.json instead")
    add("--ranks", type=positive, metavar="N", help="by default as many as the job's degrees need")
    devices = ", ".join(known_hardware())
    add("--hardware", metavar="NAME|FILE", help=f"also give the time: of {devices}, or of a file")
    add("--calibrate", metavar="FILE", help="measure this CPU, write its hardware file, and stop")
    add("--html", metavar="FILE", help="write a page with charts")
    rows = "plan published runs, by default those of titanlite's own page, and print the errors"
    add("--published", metavar="ROWS", nargs="?", const=PUBLISHED, help=rows)
    account = "which stages hold it, how it lies on each mesh axis, and what completes its gradient"
    account = f"print the account of every tensor instead: {account}"
    add("--tensors", action="store_true", help=account)
    add("--trace", metavar="FILE", help="write the step as a Chrome trace, for ui.perfetto.dev")
    add("--svg", metavar="FILE", help="write the predicted pipeline as a picture")
    measured = "a run's pipeline_step_N.json, or their folder, to draw below the step in --svg"
    add("--measured", metavar="FILE", help=measured)
    search = "find the best plan for --ranks on --hardware; keys on the command line stay fixed"
    add("--search", action="store_true", help=search)
    add("--best", metavar="FILE", help="write the job with the best plan found")
    every = "try every context-parallel degree, also where smaller ones were faster"
    add("--exhaustive", action="store_true", help=every)
    return parser


def _tensors(resolved: ResolvedJob) -> list[str]:
    """The account of every tensor as a table; raises ConfigError if a tensor has no answer."""
    from titanlite.tools.planner.tensors import describe
    from titanlite.tools.planner.trace import tensor_account

    accounts = tensor_account(resolved)
    number = sum(one.kind == "parameter" for one in accounts.values())
    buffers = len(accounts) - number
    of_buffers = f", {buffers} persistent buffers" if buffers else ""
    heading = f"{number} parameters{of_buffers}; {resolved.dims.describe()}"
    return [heading, "", *describe(accounts, terminal_width(sys.stdout, 0))]


def _search(
    options: argparse.Namespace, words: list[str], rest: list[str], hardware: Hardware | None
) -> int:
    from titanlite.tools.planner import search_report
    from titanlite.tools.planner.search import interrupted_once

    if hardware is None:
        raise ConfigError("--search: plans have no times without --hardware; give both")
    for option in ("trace", "svg", "measured"):
        if getattr(options, option):
            raise ConfigError(
                f"--{option}: a search has many plans; plan the one that --best wrote"
            )
    # A job for another number of ranks need not be legal as it is.
    reading = read_job([*words, *rest])
    asked = reading.require()
    config, notes = plannable(asked, hardware=hardware)
    num_ranks = options.ranks or resolve_job(config).dims.world_size
    fixed = [one.removeprefix("--").partition("=")[0] for one in rest if one.startswith("--")]
    keys = [key for key in fixed if key.startswith(("parallelism.", "activation_checkpoint."))]
    keys += [key for key in fixed if key in KEPT_TRAINING]
    space = search_report.make_space(config, reading.draft(num_ranks), num_ranks, hardware, keys)
    with interrupted_once():
        tell("searching; Ctrl-C ends it and keeps what it has found")
        result = search_report.run_search(space, hardware, exhaustive=options.exhaustive)
        found = search_report.search_figures(result, hardware)
        if options.json:
            write(options.json, json.dumps(found, indent=1))
        if options.html:
            write(options.html, draw_page(search=found, title=config.job.description))
        if options.best and result.best:
            # The job as it was given: it may run on another device than the one it is planned for.
            best = override(asked, result.best[0].changes)
            write(options.best, search_report.write_toml(best))
        print(search_report.show_search(result, hardware))
        print("".join(f"note: {note}\n" for note in notes), end="", flush=True)
    return 0 if result.best and not result.failures else 1


def _first_screen(resolved: ResolvedJob, plan: JobPlan) -> str:
    """The job as a run shows it at its start, with its effective plan."""
    num_parameters = getattr(resolved.model, "num_parameters", None)
    if num_parameters is None:
        from titanlite.tools.planner.trace import count_parameters

        num_parameters = count_parameters(resolved)
    device, folder = Fact("device", ""), Path()
    facts = run_facts(resolved, device, "", None, num_parameters=num_parameters, folder=folder)
    facts = [fact for fact in facts if fact.name in OF_A_PLAN]
    title = resolved.config.job.description
    applied = plan.applied or load_applied(resolved)
    return render_screen(title, facts, applied, draw_mesh(plan.dims), stream=sys.stdout)


def _read_measured(file: str | None, svg: str | None) -> Timeline | None:
    """The timeline of a run's trace, or of the fastest one in a folder, if --measured is given."""
    if file is None:
        return None
    if svg is None:
        raise ConfigError("--measured: it is drawn in a picture; give --svg, too")
    path = Path(file)
    try:
        found = list(path.glob("pipeline_step_*.json")) if path.is_dir() else [path]
        timelines = [read_trace(one.read_text(encoding="utf-8")) for one in found]
        if not timelines:
            raise ConfigError(
                f"--measured: {file} has no pipeline_step_N.json; give another folder"
            )
        return min(timelines, key=lambda timeline: timeline.end - timeline.start)
    except OSError as error:
        raise ConfigError(
            f"--measured: {file} cannot be read ({error.strerror}); give another file"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"--measured: {file} is not the trace of a pipeline; give a pipeline_step_N.json of a "
            "run with profiling.enable_pipeline_timeline = true"
        ) from error
