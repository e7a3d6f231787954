"""Formats a comparison as text."""

from __future__ import annotations

from titanlite.tools.verify.program.comparison import Comparison
from titanlite.tools.verify.report import format_result, judge


def format_comparison(found: Comparison) -> str:
    """The parallel code and its reference, the table of differences, and the diagnosis."""
    steps = f"{found.num_steps} step{'s' * (found.num_steps > 1)}"
    ranks = f"{found.grid.world_size} rank{'s' * (found.grid.world_size > 1)}"
    lines = [
        f"parallel   {found.name}: {found.grid.describe()}, {ranks}",
        f"reference  the same batches on one process; {found.dtype}, {steps}",
    ]
    if found.losses:
        lines.append(f"loss       the {found.losses} over the parts of the batch")
    if found.error is not None:
        verdict = f"DOES NOT RUN: {found.error} ({found.seconds:.1f} s)"
        text = format_result(found, verdict, found.findings[1:], found.dtype)
        return "\n".join([*lines, "", text, "", found.error.rank_traceback]).rstrip()
    return "\n".join([*lines, "", format_result(found, judge(found), found.findings, found.dtype)])
