"""`titanlite plan`: what a job's step takes and how long it lasts, before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config import load_config, resolve_job
from titanlite.config.load import override
from titanlite.errors import ConfigError
from titanlite.observe.terminal import terminal_width, uses_color
from titanlite.plan.hardware import known_hardware, load_hardware
from titanlite.plan.html import draw_page
from titanlite.plan.planning import plan_job
from titanlite.plan.report import figures, show
from titanlite.plan.spans import make_timeline, step_spans
from titanlite.schedule.trace import make_trace

if TYPE_CHECKING:
    from titanlite.config import JobConfig

EPILOG = "Any key of the job can follow: --section.key=value."


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="titanlite plan", description=__doc__, epilog=EPILOG)
    parser.add_argument("job", help="the TOML file of the job")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help=f"also give the time: of {', '.join(known_hardware())}, or of a file",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with charts")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write the predicted step as a Chrome trace, for ui.perfetto.dev",
    )
    options, rest = parser.parse_known_args(arguments)
    hardware = load_hardware(options.hardware) if options.hardware else None
    if options.trace and hardware is None:
        raise ConfigError("--trace: a step has no times without --hardware; give both")
    asked = load_config([f"--job.config_file={options.job}", *rest])
    config, notes = plannable(asked)
    plan = plan_job(resolve_job(config, None), hardware, is_compiled=asked.compile.enable)
    plan.notes.extend(notes)
    print(show(plan, width=terminal_width(sys.stdout), color=uses_color(sys.stdout)))
    if options.json:
        _write("--json", options.json, json.dumps(figures(plan), indent=1))
    if options.html:
        page = draw_page(figures(plan), step_spans(plan), title=config.job.description)
        _write("--html", options.html, page)
    if options.trace:
        timeline = make_timeline(step_spans(plan), plan.dims)
        _write("--trace", options.trace, make_trace(timeline))
    return 0


def _write(option: str, file: str, text: str) -> None:
    """Write a file that an option asks for."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option}: {file} cannot be written ({error.strerror}); give another file"
        ) from error


def plannable(config: JobConfig) -> tuple[JobConfig, list[str]]:
    """The job as it can be traced on this machine, and what that changes."""
    changes: dict[str, Any] = {}
    notes = []
    if config.compile.enable:
        changes["compile.enable"] = False
        notes.append("compile: planned as eager code; a compiled step keeps fewer activations")
    if config.quantize.linear.float8.enable_fsdp_float8_all_gather:
        changes["quantize.linear.float8.enable_fsdp_float8_all_gather"] = False
        changes["quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"] = False
        notes.append("float8: planned with FSDP's all-gathers in the compute dtype, not in float8")
    if config.training.enable_cpu_offload:
        notes.append("offload: parameters and optimizer state, which the CPU holds, are included")
    if config.comm.mode != "default":
        changes["comm.mode"] = "default"
    if config.job.device == "cuda":
        changes["job.device"] = "cpu"
        notes.append("device: traced on the CPU; kernels of a GPU keep other scratch memory")
    return (override(config, changes) if changes else config), notes
