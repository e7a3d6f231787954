"""The commands for jobs of TorchTitan, and what they print: verify, debug, plan, import."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial

from titanlite.observe.terminal import tell, telling, terminal_width
from titanlite.tools.figures.palette import uses_color
from titanlite.tools.options import say, write
from titanlite.tools.torchtitan.options import DEBUG_FLAGS, OF_DEBUG, OF_PLAN, PREFIX, parse
from titanlite.tools.verify.command import conclude, require_files

HELP = """usage: titanlite verify torchtitan:NAME [options] [--section.key=value ...]

Run a job of TorchTitan 0.3, as it is installed, under its plan and on one rank, and compare every
gradient and every weight, step by step. NAME is a function of one of its config registries, such
as llama3_debugmodel, or your own, PACKAGE.MODULE:FUNCTION. All ranks run on the CPU.

  --steps N           optimizer steps to compare (default 2)
  --dtype DTYPE       float64 (default), or float32, which keeps TorchTitan's own casts
  --tolerance X       the largest relative difference that counts as agreement
  --ranks N           ranks in all, for a shard degree of -1 (default: as few as the rest allows)
  --processes         run the ranks as processes, not as threads of this one
  --full              keep the job's own length, batch and number of layers
  --json FILE         write every difference of every step, and the diagnosis
  --junit FILE        write a test case, as JUnit XML for a CI system
  --section.key=value TorchTitan's own options, such as --parallelism.tensor_parallel_degree=2

exit status: 0 all agree, 1 something differs or the plan does not run, 2 bad input; see
docs/torchtitan.md"""


@telling("training on one rank and on those of the plan")
def verify(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError for bad input."""
    options = parse(arguments, text=HELP)
    require_files(options.json, options.junit)
    from titanlite.tools.torchtitan.verify import verify_job
    from titanlite.tools.verify.report import format_result

    found = verify_job(options, on_start=lambda lines: say(_header(lines)))
    job = {"config": PREFIX + options.name, "options": options.titan}
    ran = {**job, "degrees": found.grid.degrees, "dtype": found.dtype}
    return conclude(found, ran, partial(format_result, dtype=found.dtype), options)


def _header(lines: Sequence[tuple[str, str]]) -> str:
    from titanlite.tools.verify.report import filled

    return "\n".join(filled(text, f"{name:11}") for name, text in (*lines, ("", "")))


DEBUG_HELP = """usage: titanlite debug torchtitan:NAME [options] [--section.key=value ...]

Train a job of TorchTitan 0.3 on ranks that are threads of this process. A debugger (pdb) opens
where a rank raises an error, and at breakpoint(); the other ranks stand still meanwhile. `others`
lists where every rank is and what it waits for. The job runs as `titanlite verify` runs it.

  --rank N            a debugger only in rank N; without it, in the first rank that comes there
  --steps N           optimizer steps to train (default 2)
  --dtype DTYPE       float64 (default), or float32, which keeps TorchTitan's own casts
  --ranks N           ranks in all, for a shard degree of -1 (default: as few as the rest allows)
  --full              keep the job's own length, batch and number of layers

exit status: 0 the job has run, 1 it has not, 2 bad input"""


def debug(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError for bad input."""
    options = parse(arguments, OF_DEBUG, DEBUG_FLAGS, text=DEBUG_HELP)
    tell("loading torchtitan")
    from titanlite.tools.torchtitan.debug import debug_job

    return debug_job(options)


PLAN_HELP = """usage: titanlite plan torchtitan:NAME [options] [--section.key=value ...]

Show what a step of a job of TorchTitan 0.3 takes on each rank: memory, what it sends, operations
and time. One rank of each pipeline stage is traced in this process, with TorchTitan's own code and
tensors without values. The job keeps its size.

  --ranks N           ranks in all, for a shard degree of -1 (default: as few as the rest allows)
  --hardware NAME     also give the time: a device that `titanlite plan --help` names, or a file
  --json FILE         write all figures to a file

exit status: 0 planned, 2 bad input; see docs/torchtitan.md"""


@telling("tracing a step of one rank of each pipeline stage")
def plan(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError for bad input."""
    options = parse(arguments, OF_PLAN, (), text=PLAN_HELP)
    require_files(options.json, "")
    from titanlite.tools.planner.hardware import load_hardware
    from titanlite.tools.planner.report import figures, show

    hardware = load_hardware(options.hardware) if options.hardware else None
    from titanlite.tools.torchtitan.plan import plan_job

    found, lines = plan_job(options, hardware)
    if options.json:
        write(options.json, json.dumps(figures(found), indent=1))
    width, color = terminal_width(sys.stdout), uses_color(sys.stdout)
    say(show(found, screen=_header(lines).rstrip(), width=width, color=color))
    return 0


IMPORT_HELP = """usage: titanlite import torchtitan:NAME [--section.key=value ...] > job.toml

Print a configuration of TorchTitan 0.3 as a job of titanlite, in TOML. What titanlite lacks is a
comment with the reason.

exit status: 0 printed, 2 bad input"""


@telling("loading the job")
def to_toml(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError for bad input."""
    options = parse(arguments or ["--help"], {}, (), text=IMPORT_HELP)
    from titanlite.tools.torchtitan.to_toml import import_job

    say(import_job(options).rstrip("\n"))
    return 0
