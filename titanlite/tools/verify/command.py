"""The command `titanlite verify`: does a plan compute what one process computes?"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titanlite.config import Reading, read_job
from titanlite.config.model import num_experts
from titanlite.errors import ConfigError, TitanliteError
from titanlite.observe.terminal import telling
from titanlite.parallelize.float8.spec import Float8Section
from titanlite.ranks.launch import choose_device
from titanlite.ranks.machine import check_local_ranks, needs_threads
from titanlite.start import check_start
from titanlite.tools.options import choice, positive, require_writable, say, split_options, write
from titanlite.tools.verify.jobs import DEFAULT_STEPS, DTYPES, steps_until_stable
from titanlite.tools.verify.junit import Case, to_junit
from titanlite.tools.verify.sensitivity import SENSITIVITY
from titanlite.tools.verify.shrink import read_small

if TYPE_CHECKING:
    from titanlite.tools.verify.result import Result

R = TypeVar("R", bound="Result")

HELP = """usage: titanlite verify CONFIG.toml [options] [--section.key=value ...]
       titanlite verify --matrix [CONFIG.toml] [--ranks N] [--output FOLDER] [options]
       titanlite verify torchtitan:NAME [options]; its --help has others

Run a job under its plan and on one process, from the same weights and data, and compare loss,
gradient norm, every gradient and every weight, step by step. Print the cause if they differ.

  --steps N           optimizer steps to compare (default 5; with --matrix 2)
  --until-stable      run until warm-up has ended, and decay and garbage collection have begun
  --dtype DTYPE       float64 (default), float32, or bfloat16, which keeps weights in float32
  --tolerance X       the largest relative difference that counts as agreement; or "sensitivity":
                      as far as rounding moves the reference (for float32 and bfloat16)
  --replay-routing    send every token to the experts to which the reference routed it
  --threads           run up to 4096 ranks as threads (default: if too many for processes)
  --processes         run them as processes, whatever comm.mode says
  --shrink            make layers, widths, sequence and batch as small as the plan allows
  --json FILE         write every difference of every step, and the diagnosis
  --junit FILE        write test cases, which fail with the cause, as JUnit XML for a CI system
  --section.key=value any key of the job, as for train.py

  --matrix            verify plans that contain every legal pair of features: of a small image
                      transformer, or of a job's model, data and optimizer (file or keys)
  --ranks N           with --matrix: the number of ranks of every plan (default 8)
  --output FOLDER     with --matrix: the folder of results (default outputs/verify)
  --compile           with --matrix: add torch.compile (aot_eager) to the features
  --limit N           with --matrix: only the first N plans, which contain the most pairs

exit status: 0 all agree, 1 something differs or does not run, 2 bad input, or no reference, 3 an
error in titanlite"""

EXAMPLE = "titanlite verify configs/tp2_fsdp2.toml"


@dataclass
class VerifyOptions:
    """The parsed command line; `job` are the arguments for the job's own keys."""

    job: list[str]
    steps: int | None = None
    dtype: str = "float64"
    tolerance: float | str | None = None
    replay_routing: bool = False
    shrink: bool = False
    until_stable: bool = False
    threads: bool = False
    processes: bool = False
    json: str = ""
    junit: str = ""
    matrix: bool = False
    ranks: int = 8
    output: str = "outputs/verify"
    compile: bool = False
    limit: int | None = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit status. Raises ConfigError for bad input."""
    options = parse(arguments)
    require_files(options.json, options.junit)
    try:
        return verify_matrix(options) if options.matrix else verify_one(options)
    except (TitanliteError, BrokenPipeError):
        raise
    except Exception:
        # Python's own exit status for an exception is that of a difference.
        traceback.print_exc()
        return 3


@telling("training on one process and on the ranks of the plan")
def verify_one(options: VerifyOptions) -> int:
    """Verify the job that the options name."""
    from titanlite.tools.verify.report import format_header, format_verification
    from titanlite.tools.verify.verify import Verifier

    if options.processes:
        options.job.append("--comm.mode=default")

    def read(changes: Mapping[str, Any]) -> Reading:
        words = (f"--{key}={'none' if v is None else v}" for key, v in changes.items())
        return read_job([*options.job, *words], needs_file=EXAMPLE)

    reading, shrunk = read_small(read) if options.shrink else (read({}), [])
    start = check_start(reading, threads=options.threads or (False if options.processes else None))
    config = start.job.config
    is_routed = config.model.name != "hf" and num_experts(config, start.job.model)
    if options.replay_routing and not is_routed:
        raise ConfigError("--replay-routing: the model has no router of titanlite; remove it")
    source = config.job.config_file or ""

    def show(text: str) -> None:
        # A reader that has closed the output must not cost the file that is asked for.
        with contextlib.suppress(*([BrokenPipeError] if options.json or options.junit else [])):
            say(text)

    if config.section(Float8Section).local_scales:
        show("float8's local_scales are off here: a rank's scales cannot be those of one process")
    steps = options.steps or DEFAULT_STEPS
    if options.until_stable:
        steps, begins = steps_until_stable(config)
        show(f"{steps} steps: {', '.join(begins)}")

    with Verifier(
        start.device_type, max_ranks=config.job.max_local_ranks, threads=start.threads
    ) as verifier:
        found = verifier.verify(
            start.job,
            steps=steps,
            reloads=True,
            dtype=options.dtype,
            tolerance=options.tolerance,
            replay=options.replay_routing,
            on_start=lambda found: show(format_header(found, source, shrunk) + "\n"),
        )
    ran = found.ran(source, shrunk)
    return conclude(found, ran, format_verification, options)


def verify_matrix(options: VerifyOptions) -> int:
    """Verify every pair of features."""
    from titanlite.tools.verify.matrix import run_matrix

    threads = options.threads or (not options.processes and needs_threads(options.ranks))
    check_local_ranks(options.ranks, key="--ranks", are_threads=threads)
    job = None
    if options.job:
        reading = read_job(options.job)
        reading.draft()
        job = reading.require()
    on_gpu = job is not None and job.job.device == "cuda"
    return run_matrix(
        num_ranks=options.ranks,
        folder=Path(options.output),
        job=job,
        steps=options.steps or 2,
        with_compile=options.compile,
        limit=options.limit,
        device_type=choose_device("cuda", 1 if threads else options.ranks) if on_gpu else "cpu",
        threads=threads,
        junit=options.junit,
    )


def parse(arguments: Sequence[str]) -> VerifyOptions:
    """Parse the options; raises ConfigError for a wrong one."""
    given, job = split_options(arguments, VALUES, FLAGS, text=HELP)
    options = VerifyOptions(job, **given)
    if options.until_stable and options.steps is not None:
        raise ConfigError("--until-stable: chooses the steps itself; remove it or --steps")
    if options.threads and options.processes:
        raise ConfigError("--threads: and --processes are two worlds; remove one")
    for attribute in given:
        name = f"--{attribute.replace('_', '-')}"
        if options.matrix and name in OF_ONE_JOB:
            raise ConfigError(f"{name}: is for a single job, not for --matrix; remove it")
        if not options.matrix and name in OF_THE_MATRIX:
            instead = ", or give --compile.enable=true" if name == "--compile" else ""
            raise ConfigError(f"{name}: works only with --matrix; remove it{instead}")
    return options


def conclude(found: R, ran: Mapping[str, Any], show: Callable[[R], str], options: Any) -> int:
    """Print what `show` makes of the result of what `ran`; returns the exit status.

    It is also written as JSON and as JUnit XML, if `options` have these files.
    """
    from titanlite.tools.verify.report import to_json, verdict

    if options.json:
        write(options.json, json.dumps(to_json(found, ran), indent=1) + "\n")
    text = show(found)
    if options.junit:
        failure = "" if found.agrees else f"{verdict(found)}. {found.cause}".removesuffix(". ")
        case = Case(ran["config"] or "job", found.seconds, failure, text)
        write(options.junit, to_junit([case]))
    say(text)
    if found.error is not None and found.error.rank_traceback:
        print(f"\n{found.error.rank_traceback}", file=sys.stderr)
    return 0 if found.agrees else 1


def require_files(json_path: str, junit_path: str) -> None:
    """Raises ConfigError if a path that is given cannot be written."""
    for option, path in (("--json", json_path), ("--junit", junit_path)):
        if path:
            require_writable(path, option)


def _tolerance(text: str) -> float | str:
    if text == SENSITIVITY:
        return text
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no positive number; give one, or {SENSITIVITY}")


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path")
    return text


VALUES: dict[str, Callable[[str], object]] = {
    "--steps": positive,
    "--dtype": choice(DTYPES),
    "--tolerance": _tolerance,
    "--json": _path,
    "--junit": _path,
    "--ranks": positive,
    "--output": _path,
    "--limit": positive,
}
OF_ONE_JOB = ("--dtype", "--tolerance", "--replay-routing", "--shrink", "--until-stable", "--json")
WORLDS = ("--threads", "--processes")
FLAGS = ("--replay-routing", "--shrink", "--until-stable", "--matrix", "--compile", *WORLDS)
OF_THE_MATRIX = ("--ranks", "--output", "--compile", "--limit")
