"""Published runs beside their plans, as `titanlite plan` makes them: `--published`. Torch-free.

A file of rows has [[source]], whose keys its [[source.row]] share. Its paths are relative to it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from titanlite.config.toml import parse_toml
from titanlite.errors import ConfigError
from titanlite.observe.terminal import telling
from titanlite.tools.options import write
from titanlite.tools.planner.hardware import load_hardware, validated
from titanlite.tools.planner.planning import plan_job, resolve


@dataclass(frozen=True)
class PublishedRun:
    """A published run: a job with further `keys`, on hardware, and its `speed` on a GPU in `unit`.

    `flops` are those that the source counts in a step of all GPUs. `gib` is what torch reserved. Of
    the keys in `tried`, which are not published, the fastest that fit count. With `fitted`, figures
    of the hardware were fitted to the speed. With `apart`, its error is not explained: it is in no
    mean of the speed but its own.
    """

    source: str
    name: str
    unit: Literal["tokens/s", "TFLOP/s", "seconds"]
    job: str
    hardware: str
    speed: float
    keys: str = ""
    gib: float | None = None
    flops: float = 0.0
    tried: tuple[str, ...] = ("",)
    fitted: bool = False
    apart: bool = False

    def command(self, keys: str) -> list[str]:
        """The arguments of `titanlite plan`: the file of the job, the hardware, and the keys."""
        return [self.job, f"--hardware={self.hardware}", *shlex.split(f"{self.keys} {keys}")]


@dataclass(frozen=True)
class Planned:
    """The plan of a row: speed and GiB in its units, and their errors; + is too fast, too much."""

    row: PublishedRun
    command: str
    speed: float
    gib: float
    speed_error: float
    gib_error: float | None
    has_speed: bool
    has_gib: bool
    """Whether the ranges of the plan have the run's speed and memory."""


def read_rows(file: Path) -> list[PublishedRun]:
    """The rows of a file; raises ConfigError."""
    values: list[dict[str, Any]] = []
    try:
        for source in parse_toml(file.read_text(encoding="utf-8"))["source"]:
            for row in source.pop("row"):
                keys = f"{source.get('keys', '')} {row.get('keys', '')}"
                values.append({**source, **row, "keys": keys})
    except OSError as error:
        text = f"--published: {file} cannot be read ({error.strerror}); give the file of the rows"
        raise ConfigError(text) from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--published: {file} has no rows: {error}") from error
    for value in values:
        for key in ("job", "hardware"):
            if str(value.get(key)).endswith(".toml"):
                value[key] = os.path.join(file.parent, value[key])
    return validated(list[PublishedRun], values, file.name)


def plan_row(row: PublishedRun) -> Planned:
    """The plan of a row, the fastest that fits of those tried."""
    device = load_hardware(row.hardware)
    found: list[tuple[bool, float, Planned]] = []
    for keys in row.tried:
        job, _, *further = command = row.command(keys)
        resolved, _ = resolve([job, *further], device)
        plan = plan_job(resolved, device, is_compiled=resolved.config.compile.enable)
        assert plan.prediction is not None
        step = plan.prediction.step
        speed = {
            "tokens/s": step.tokens_per_second,
            "TFLOP/s": row.flops / step.seconds / resolved.dims.world_size / 1e12,
            "seconds": step.seconds,
        }[row.unit]
        ratio = row.speed / speed if row.unit == "seconds" else speed / row.speed
        gib = plan.reserved_bytes / 2**30
        of_gib = gib / row.gib - 1 if row.gib else None
        least, most = plan.seconds_range or (0.0, 0.0)
        has_speed = least <= step.seconds * ratio <= most
        least, most = device.accuracy.memory if device.accuracy else (0.0, 0.0)
        has_gib = least * gib <= (row.gib or 0.0) <= most * gib
        errors = ratio - 1, of_gib
        planned = Planned(row, shlex.join(command), speed, gib, *errors, has_speed, has_gib)
        found.append((plan.device_bytes > device.memory.num_bytes, step.seconds, planned))
    return min(found, key=lambda one: one[:2])[2]


def compare(file: Path, to: str | None = None) -> str:
    """The table of the rows in a file; also written `to` a file, as JSON."""
    planned = []
    for row in read_rows(file):
        with telling(f"planning {row.name}"):
            planned.append(plan_row(row))
    if to:
        write(to, json.dumps([asdict(one) for one in planned], indent=1))
    return "\n".join(show(planned))


def show(planned: list[Planned]) -> Iterator[str]:
    """The rows of each source with their errors, and the commands."""
    for source in dict.fromkeys(one.row.source for one in planned):
        of = [one for one in planned if one.row.source == source]
        memory = "      GiB planned   error" if any(one.row.gib for one in of) else ""
        yield f"{source}\n{'':42}{of[0].row.unit:>9}   planned   error {memory:>31}".rstrip()
        for one in of:
            row = one.row
            line = f"  {row.name:40}{row.speed:9,.5g}{one.speed:10,.5g}{one.speed_error:+8.1%}"
            line += " fitted" * row.fitted + " apart" * row.apart
            if one.gib_error is not None:
                line = f"{line:76}{row.gib:9.1f}{one.gib:8.1f}{one.gib_error:+8.1%}"
            yield line
        yield from (*_errors(of), "")
    yield from ("All sources", *_errors(planned), "")
    yield from (f"titanlite plan {one.command}" for one in planned)


def _errors(planned: list[Planned]) -> Iterator[str]:
    """Mean error, signed mean and worst of the speed that was not fitted, and of memory."""
    rows = [one for one in planned if not one.row.fitted]
    of_speed = {
        name: [(one.speed_error, one.has_speed) for one in rows if one.row.apart == is_apart]
        for name, is_apart in (("speed, not fitted", False), ("speed, apart", True))
    }
    of_memory = [(one.gib_error, one.has_gib) for one in planned if one.gib_error is not None]
    for what, found in (*of_speed.items(), ("memory", of_memory)):
        if found:
            errors = [error for error, _ in found]
            mean, worst = fmean(map(abs, errors)), max(errors, key=abs)
            text = f"mean error {mean:.1%}, signed {fmean(errors):+.1%}, worst {worst:+.1%}"
            yield f"  {what}, {len(found)} rows: {text}; in range {sum(has for _, has in found)}"
