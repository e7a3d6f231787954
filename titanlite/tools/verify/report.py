"""Formats a verification as text for a terminal, and as JSON."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from titanlite.observe.terminal import DEFAULT_WIDTH, terminal_width
from titanlite.tools.tables import format_table
from titanlite.tools.verify.differences import (
    NARROW_TOLERANCE,
    NUMBERS,
    WORDS,
    Disagreement,
    Key,
    badness,
)
from titanlite.tools.verify.result import Result, Verification
from titanlite.tools.verify.wording import listed

# The lines about tokens that are routed elsewhere.
MOST_MOVED = 6
# A larger relative difference is one from a tensor that is zero but for rounding.
MOST_FIGURE = 1e12
KINDS = ("loss", "norm", "gradient", "weight", "state")


def format_header(found: Verification, source: str, shrunk: list[str]) -> str:
    """The plan and the reference, before the run."""
    sizes = (size for step, size in found.job.batch_sizes if step <= found.num_steps)
    batch = " then ".join(map(str, sizes))
    size = found.job.global_batch_size // found.reference_parts
    ep = f", ep {found.job.dims.ep}" if found.job.dims.ep_enabled else ""
    how = "in one batch" if found.reference_parts == 1 else f"{size} at a time"
    ranks = f"{found.job.dims.world_size} ranks" + " as threads" * found.threads
    ranks += (" on one GPU" if found.threads else " on GPUs") * (found.device_type == "cuda")
    lines = [
        ("plan", f"{found.job.dims.describe()}{ep}, {ranks}: {source}"),
        ("reference", f"the same {batch} sequences per step on one process, {how}; {found.dtype}"),
        ("shrunk", ", ".join(shrunk)),
    ]
    return "\n".join(filled(text, f"{name:11}") for name, text in lines if text)


def format_verification(found: Verification, header: str = "") -> str:
    """The verdict, the diagnosis if something differs, and the table of differences."""
    text = format_result(found, found.dtype, header)
    if found.moved and (found.replays or found.dtype != "float64"):
        lines = found.moved[:MOST_MOVED]
        if len(found.moved) > MOST_MOVED:
            lines.append(f"and in {len(found.moved) - MOST_MOVED} more layers and steps")
        how = "without the replay of the reference's routing, some" if found.replays else "some"
        text += f"\n\nnote: {how} tokens go to other experts than on one process:\n"
        text += "\n".join(filled(line, "  ", "    ") for line in lines)
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
    blocks = [*map(filled, texts), header, _table(found) if found.differences else ""]
    return "\n\n".join(block for block in [*blocks, *map(filled, notes)] if block)


def filled(text: str, begin: str = "", indent: str | None = None) -> str:
    """`text` after `begin`, in lines that fit a terminal, or of 100 characters."""
    width = min(DEFAULT_WIDTH, terminal_width(sys.stdout))
    after = " " * len(begin) if indent is None else indent
    wrapper = textwrap.TextWrapper(width, begin, after, break_on_hyphens=False)
    wrapper.break_long_words = False
    return wrapper.fill(text)


def _table(found: Result) -> str:
    """A row for each step."""
    rows = []
    for step, of_step in enumerate(found.differences):
        name = str(step or "start")
        kinds = KINDS if step else ("", "", "", "start", "")
        cells = [_cell(found, step, of_step, kind) for kind in kinds]
        *most, (state, _) = cells
        joined = [f"{figure:8} {of}".rstrip() for figure, of in most]
        rows.append((name, *joined, state.partition(" (")[0]))
    headings = ("step", "loss", "norm", "worst gradient", "worst weight", "state")
    return format_table(headings, rows, headings[1:], terminal_width(sys.stdout, 0))


def _cell(found: Result, step: int, of_step: Mapping[Key, float], kind: str) -> tuple[str, str]:
    """The difference that is largest relative to its tolerance, "!" if any is too large, and of."""
    values = {key: value for key, value in of_step.items() if key[0] == kind}
    if not values:
        return "", ""
    worst = max(values, key=lambda k: (badness(values[k], found.tolerance.of(step, k)), values[k]))
    text = _figure(values[worst])
    failed = [f for f in found.failures if f.step == step and f.kind == kind]
    if failed:
        text += " !"
        if len(values) > 1:
            text += f" ({len(failed)} of {len(values)})"
    return text, worst[1]


def _figure(value: float) -> str:
    if value == 0.0:
        return "0"
    if value > MOST_FIGURE:
        return "not comparable" if math.isinf(value) else "not 0"
    return f"{value:.1e}"


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

    failed = [asdict(f) | {"difference": number(f.difference)} for f in found.failures]
    has_run = bool(found.differences)
    return {
        **ran,
        "threads": found.threads,
        "device": found.device_type,
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
