"""`titanlite plan`: the memory, communication and operations of a job's step, before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from titanlite.config import load_config, resolve_job
from titanlite.config.load import override
from titanlite.drawing.mesh import draw_mesh
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.observe.first_screen import render_screen
from titanlite.observe.quantities import format_bytes, format_count
from titanlite.observe.run_facts import job_facts
from titanlite.plan.events import CATEGORIES, Trace, totals

if TYPE_CHECKING:
    from titanlite.config import JobConfig

EPILOG = "Any key of the job can follow: --section.key=value."
BAR_WIDTH = 40
LETTERS = dict(zip(CATEGORIES, "PGOAFC.", strict=True))
"""The letter of each category in a bar."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="titanlite plan", description=__doc__, epilog=EPILOG)
    parser.add_argument("job", help="the TOML file of the job")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="by default as many as the job's degrees need"
    )
    options, rest = parser.parse_known_args(arguments)
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks: {options.ranks} is too small; give at least 1")
    config, notes = plannable(*_load([f"--job.config_file={options.job}", *rest]))
    resolved = resolve_job(config, options.ranks)
    from titanlite.plan.trace import count_parameters, trace_rank

    layout = config.parallelism.context_parallel_load_balancer
    ranks = representatives(resolved.dims, layout)
    traces = [trace_rank(resolved, rank) for rank in ranks]
    facts = job_facts(resolved, count_parameters(resolved))
    content = config.job.description, facts, traces[0].applied, draw_mesh(resolved.dims)
    print(render_screen(*content, stream=sys.stdout))
    print("\n".join(["", *show_memory(traces), "", *show_communication(traces), *notes]))
    if options.json:
        try:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump([figures(trace) for trace in traces], file, indent=1)
        except OSError as error:
            raise ConfigError(
                f"--json: {options.json} cannot be written ({error.strerror}); give another file"
            ) from error
    return 0


def _load(arguments: list[str]) -> tuple[JobConfig, list[str]]:
    """The job, and notes; a step does not depend on a tokenizer, so that may be missing."""
    key = "model.hf_assets_path"
    try:
        return load_config(arguments), []
    except ConfigError as error:
        if not all(problem.startswith(f"{key}:") for problem in error.problems):
            raise
        note = f"{key}: there is no tokenizer, so its vocabulary is not compared with the model's"
        return load_config([*arguments, f"--{key}="]), [note]


def plannable(config: JobConfig, notes: Sequence[str] = ()) -> tuple[JobConfig, list[str]]:
    """The job as it can be traced on this machine, and what that changes, after `notes`."""
    changes: dict[str, Any] = {}
    notes = list(notes)
    if config.compile.enable:
        notes.append("compile: operators are counted one by one; the compiler fuses some of them")
    if config.training.enable_cpu_offload:
        notes.append("offload: parameters and optimizer state, which the CPU holds, are included")
    if config.comm.mode != "default":
        changes["comm.mode"] = "default"
    if config.job.device == "cuda":
        notes.append("device: without a GPU here, traced on the kernels of the CPU")
    lines = ["", *(f"note: {note}" for note in notes)] if notes else []
    return (override(config, changes) if changes else config), lines


def representatives(dims: ParallelDims, layout: str | None = None) -> list[int]:
    """One rank per pipeline stage, those with the largest shards: the first of other axes.

    Of more than four stages: the first two, the middle one and the last. In context parallelism
    with contiguous shards (layout "none") the last rank attends to the most keys.
    """
    last = {"cp": dims.cp - 1} if layout == "none" else {}
    places = list(range(dims.pp))
    if dims.pp > 4:
        places = [0, 1, dims.pp // 2, dims.pp - 1]
    return [dims.rank(pp=place, **last) for place in places]


def show_memory(traces: Sequence[Trace]) -> list[str]:
    """A bar for each rank: the bytes of each category at the peak of a step."""
    peaks = [trace.peak() for trace in traces]
    largest = max(peak.num_bytes for peak in peaks)
    lines = ["memory of a rank at the peak of a step"]
    for trace, peak in zip(traces, peaks, strict=True):
        bar = ""
        for name in CATEGORIES:
            share = peak.bytes_of.get(name, 0) / largest
            bar += LETTERS[name] * round(BAR_WIDTH * share)
        where = f"{peak.place.phase} of {peak.place.module}" if peak.place.module else "the step"
        total = format_bytes(peak.num_bytes)
        lines.append(f"  {_name(trace):12} {total:>9} {bar:{BAR_WIDTH}}  {where}")
    lines.append("")
    header = "".join(f"{_name(trace):>12}" for trace in traces)
    lines.append(f"    {'':22}{header}")
    for name in CATEGORIES:
        cells = [format_bytes(peak.bytes_of.get(name, 0)) for peak in peaks]
        if any(peak.bytes_of.get(name, 0) for peak in peaks):
            lines.append(f"  {LETTERS[name]} {name:22}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def show_communication(traces: Sequence[Trace]) -> list[str]:
    """Number and bytes of each kind of communication, by axis, for each rank."""
    of_ranks = [totals(trace.communications) for trace in traces]
    keys = sorted({key for of in of_ranks for key in of}, key=lambda key: (key[1], key[0]))
    lines = ["communication of a rank in a step: number, bytes of whole tensors"]
    lines.append(f"    {'':26}" + "".join(f"{_name(trace):>20}" for trace in traces))
    for kind, axis in keys:
        cells = []
        for of in of_ranks:
            count, num_bytes = of.get((kind, axis), (0, 0))
            cells.append(f"{count:,} x, {format_bytes(num_bytes)}" if count else "-")
        lines.append(f"    {axis:13}{kind:13}" + "".join(f"{cell:>20}" for cell in cells))
    flops = "".join(f"{format_count(trace.flops, spaced=True) + 'FLOP':>20}" for trace in traces)
    lines += ["", f"    {'products':26}{flops}"]
    return lines


def figures(trace: Trace) -> dict[str, Any]:
    """What is known of a rank, for programs."""
    peak = trace.peak()
    return {
        "rank": trace.rank,
        "coordinates": trace.coordinates,
        "held_bytes": trace.held,
        "peak": {"bytes": peak.num_bytes, "bytes_of": peak.bytes_of, **peak.place._asdict()},
        "flops": trace.flops,
        "communications": [asdict(one) for one in trace.communications],
    }


def _name(trace: Trace) -> str:
    return f"rank {trace.rank}"
