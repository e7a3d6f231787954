"""Formats a verification as text for a terminal, and as JSON."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from titanlite.quantities import format_table
from titanlite.tools.verify.differences import NARROW_TOLERANCE, NUMBERS, Disagreement, Key, badness
from titanlite.tools.verify.result import Result, Verification
from titanlite.tools.verify.wording import listed

WIDTH = 100
# The lines about tokens that are routed elsewhere.
MOST_MOVED = 6
HEADINGS = ("step", "loss", "norm", "worst gradient", "worst weight", "state")


def format_header(found: Verification, source: str, shrunk: list[str]) -> str:
    """The plan and the reference, before the run."""
    batch = found.job.global_batch_size
    size = batch // found.reference_parts
    ep = f", ep {found.job.dims.ep}" if found.job.dims.ep_enabled else ""
    how = "in one batch" if found.reference_parts == 1 else f"{size} at a time"
    ranks = f"{found.job.dims.world_size} ranks{' as threads' if found.threads else ''}"
    lines = [
        f"plan       {found.job.dims.describe()}{ep}, {ranks}: {source}",
        f"reference  the same {batch} sequences per step on one process, {how}; {found.dtype}",
    ]
    if shrunk:
        lines.append(f"shrunk     {', '.join(shrunk)}")
    return "\n".join(lines)


def format_verification(found: Verification, header: str = "") -> str:
    """The verdict, the diagnosis if something differs, and the table of differences."""
    text = format_result(found, found.dtype, header)
    if found.moved and (found.replays or found.dtype != "float64"):
        lines = found.moved[:MOST_MOVED]
        if len(found.moved) > MOST_MOVED:
            lines.append(f"and in {len(found.moved) - MOST_MOVED} more layers and steps")
        how = "without the replay of the reference's routing, some" if found.replays else "some"
        text += f"\n\nnote: {how} tokens go to other experts than on one process:\n"
        text += "\n".join(
            textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ")
            for line in lines
        )
    return text


def format_result(found: Result, dtype: str, header: str = "") -> str:
    """The verdict, the diagnosis if something differs, the `header` and the table, and notes."""
    findings = [finding for finding in found.findings if finding != found.error_finding]
    texts = [verdict(found)]
    is_first = findings[:1] == found.findings[:1]
    for index, finding in enumerate(findings):
        texts.append(f"{'likely cause' if index == 0 and is_first else 'also seen'}: {finding}")
    if found.agrees:
        texts += [f"but {note}" for note in found.doubts]
        texts += [f"but the plan {note}" for note in found.needless]
    notes = [f"note: {note}" for note in found.notes]
    if found.narrowed and dtype == "float64":
        names, verb = listed(found.narrowed, 3), "rounds" if len(found.narrowed) == 1 else "round"
        notes.insert(
            0,
            f"note: {names} {verb} to a narrower dtype inside this {dtype} run, so the "
            f"tolerance is at least {NARROW_TOLERANCE:.0e} and smaller errors are not found",
        )
    blocks = [*map(_filled, texts), header, _table(found) if found.differences else ""]
    return "\n\n".join(block for block in [*blocks, *map(_filled, notes)] if block)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(found: Result) -> str:
    rows = []
    for step, of_step in enumerate(found.differences):
        kinds = ("start",) if step == 0 else ("loss", "norm", "gradient", "weight", "state")
        cells = {kind: _cell(found, step, of_step, kind) for kind in kinds}
        rows.append(
            (
                "start" if step == 0 else str(step),
                cells.get("loss", ""),
                cells.get("norm", ""),
                cells.get("gradient", ""),
                cells.get("weight", cells.get("start", "")),
                re.split(r"  |\(| (?=[a-z])", cells.get("state", ""))[0].strip(),
            )
        )
    return format_table(HEADINGS, rows, left=HEADINGS[1:])


def _cell(found: Result, step: int, of_step: Mapping[Key, float], kind: str) -> str:
    """The difference that is largest relative to its tolerance; "!" if any is too large."""
    values = {key: value for key, value in of_step.items() if key[0] == kind}
    if not values:
        return ""

    worst = max(values, key=lambda k: (badness(values[k], found.tolerance.of(step, k)), values[k]))
    text = _figure(values[worst])
    failed = [f for f in found.failures if f.step == step and f.kind == kind]
    if failed:
        text += " !"
        if len(values) > 1:
            text += f" ({len(failed)} of {len(values)})"
    return f"{text:8} {worst[1]}".rstrip()


def _figure(value: float) -> str:
    if value == 0.0:
        return "0"
    return "not comparable" if math.isinf(value) else f"{value:.1e}"


def verdict(found: Result) -> str:
    """Whether a parallel run agrees, with the largest difference or what differs."""
    seconds = f"{found.seconds:.1f} s"
    if found.error is not None:
        return f"DOES NOT RUN: {found.error} ({seconds})"
    if isinstance(found, Verification) and found.wrong_sums:
        return f"DIFFERS: on one process, the batch in parts from the undivided batch ({seconds})"
    if found.agrees:
        step, key = found.worst
        if math.isinf(found.margin):
            return f"AGREES: every number is equal ({seconds})"
        return (
            f"AGREES: max difference {found.differences[step][key]:.2g}, tolerance "
            f"{found.tolerance.of(step, key):.2g}, in {describe_key(key)} at step {step} "
            f"({seconds})"
        )
    if found.problems and not found.failures:
        return f"DIFFERS: {found.problems[0]} ({seconds})"
    if not found.failures:
        return f"DIFFERS: replicas hold different values ({seconds})"
    return f"DIFFERS: {describe_failures(found.failures)} ({seconds})"


def describe_failures(failures: list[Disagreement]) -> str:
    """What differs in the first differing step, counted by kind."""
    first = failures[0].step
    counts: dict[str, int] = {}
    for failure in failures:
        if failure.step == first:
            counts[failure.kind] = counts.get(failure.kind, 0) + 1
    parts = [
        WORDS[kind] if kind in NUMBERS else f"{count} {WORDS[kind]}{'' if count == 1 else 's'}"
        for kind, count in counts.items()
    ]
    where = "before the first step" if first == 0 else f"from step {first} on"
    return f"{', '.join(parts)}, {where}"


def describe_key(key: Key) -> str:
    """The quantity that a key stands for, in words."""
    kind, name = key
    return WORDS[kind] if kind in NUMBERS else f"the {WORDS[kind]} {name}"


WORDS = {
    "start": "starting weight",
    "loss": "the loss",
    "auxiliary_loss": "the auxiliary loss",
    "norm": "the gradient norm",
    "gradient": "gradient",
    "load": "count of tokens by expert",
    "lr": "the learning rate",
    "weight": "weight",
    "state": "optimizer state",
    "buffer": "buffer",
    "validation": "the validation loss",
    "metric": "validation metric",
    "reloaded": "reloaded tensor",
}


def to_json(found: Result, ran: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result as JSON, after what `ran`; a difference that is not finite is null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def group(step: int, of_step: Mapping[Key, float]) -> dict[str, Any]:
        row: dict[str, Any] = {"step": step}
        for kind, name in of_step:
            value = number(of_step[kind, name])
            if name:
                row.setdefault(f"{kind}s" if kind != "start" else "weights", {})[name] = value
            else:
                row[kind] = value
        return row

    failed = [
        {
            "step": f.step,
            "kind": f.kind,
            "name": f.name,
            "difference": number(f.difference),
            "tolerance": f.tolerance,
        }
        for f in found.failures
    ]
    has_run = bool(found.differences)
    return {
        **ran,
        "threads": found.threads,
        "agrees": found.agrees,
        "margin": number(found.margin) if has_run else None,
        "largest": number(found.differences[found.worst[0]][found.worst[1]]) if has_run else None,
        "error": None if found.error is None else str(found.error),
        "failures": failed,
        "different_replicas": [
            {"step": s.step, "name": s.name, "ranks": s.groups} for s in found.splits
        ],
        "notes": found.notes,
        "doubts": found.doubts,
        "needless": found.needless,
        "sent": [
            {f"{kind} over {axis}": list(both) for (kind, axis), both in own.totals.items()}
            for own in found.traffic
        ],
        "diagnosis": [str(finding) for finding in found.findings],
        "steps": [group(step, of_step) for step, of_step in enumerate(found.differences)],
        "seconds": round(found.seconds, 3),
    }
