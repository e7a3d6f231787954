"""`titanlite plan --search`: the search with its progress, its tables, and the best job's TOML."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from titanlite.config import JobConfig
from titanlite.config.checks import run_checks
from titanlite.config.draft import Draft
from titanlite.config.model import num_experts, resolve_model
from titanlite.config.pipeline import split_points
from titanlite.config.toml import show, show_name
from titanlite.errors import ConfigError
from titanlite.observe.terminal import folded, is_terminal, terminal_width
from titanlite.parallelize.float8.spec import FLOAT8
from titanlite.quantities import format_bytes, format_count
from titanlite.tools.options import counting_bar
from titanlite.tools.planner.evaluate import FoundPlan
from titanlite.tools.planner.hardware import Hardware
from titanlite.tools.planner.search import Round, SearchResult, search
from titanlite.tools.planner.space import CHANGED, CP, GLOBAL_BATCH, Space, describe, value_of
from titanlite.tools.simulate.quantity import format_seconds

SHOWN_EVERY_SECONDS = 30.0
PLAN_COLUMN, LEAST_PLAN = 51, 28


def make_space(
    config: JobConfig, draft: Draft, num_ranks: int, hardware: Hardware, keys: Sequence[str]
) -> Space:
    """The plans of a job; `keys` of it stay as they are.

    Raises ConfigError if plans cannot be compared, if no plan is legal, or if there is none. A
    tokenizer may be missing: no plan depends on it.
    """
    problems = run_checks(draft, unknown=CHANGED)
    if wrong := [one for one in problems if not one.startswith("model.hf_assets_path:")]:
        raise ConfigError(*wrong)
    if config.training.enable_cpu_offload and config.job.device == "cuda":
        _ = hardware.offload_host  # raises ConfigError if it is not known
    model = draft.model
    if config.training.global_batch_size == -1:
        raise ConfigError(
            f"{GLOBAL_BATCH}: -1 follows from the plan, and a search compares plans of one global "
            "batch; give it"
        )
    kept = {key: value_of(config, key) for key in keys}
    num_blocks = sum("." in name for name in split_points(config, model))
    space = Space(
        config,
        num_ranks,
        hardware.node.num_ranks,
        num_blocks,
        kept,
        num_experts(config, model),
        has_host=hardware.host is not None,
    )
    if next(space.candidates(), None) is None:
        given = " and the keys given" if keys else ""
        raise ConfigError(
            f"--ranks: no plan has {num_ranks} ranks with {GLOBAL_BATCH} = "
            f"{config.training.global_batch_size}{given}; give another number"
        )
    return space


def run_search(
    space: Space, hardware: Hardware, *, exhaustive: bool = False, use_cache: bool = True
) -> SearchResult:
    """Search with a progress bar on a terminal."""
    most = most_tokens_per_second(space.config, hardware)
    with counting_bar() as progress:
        task = progress.add_task("plans", total=None)
        began = shown = time.monotonic()
        number = 0

        def on_progress(result: SearchResult, now: Round) -> None:
            nonlocal began, number, shown
            if now.number != number:
                began, number = time.monotonic(), now.number
            best, left = result.best, ""
            if now.done:
                seconds = (time.monotonic() - began) * (now.total - now.done) / now.done
                left = f"{format_seconds(seconds)} left, "
            more = f"round {number}, {left}{len(result.found):,} fit"
            if best:
                more += f", best {format_count(best[0].tokens_per_second)} tokens/s/rank"
            if best and most:
                more += f", {most / best[0].tokens_per_second - 1:.0%} more at most"
            if not is_terminal(sys.stderr) and time.monotonic() - shown > SHOWN_EVERY_SECONDS:
                shown = time.monotonic()
                counts = f"{now.done:,} of {now.total:,} plans"
                print(f"search: {more}; {counts}", file=sys.stderr, flush=True)
            progress.update(task, completed=now.done, total=now.total, description=more)

        found = search(
            space,
            hardware,
            is_compiled=space.config.compile.enable,
            use_cache=use_cache,
            num_workers=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2,
            exhaustive=exhaustive,
            on_progress=on_progress,
        )
    found.most_tokens_per_second = most
    return found


def most_tokens_per_second(config: JobConfig, hardware: Hardware) -> float | None:
    """What no plan exceeds for a rank: the model's products alone, at the speed of large ones.

    None if the model has no formula for them, or the hardware file measured operators.
    """
    model = resolve_model(config).sizes
    if hardware.operators or not hasattr(model, "flops_per_token"):
        return None
    dtype = "float8" if FLOAT8.is_on(config) else config.training.param_dtype
    share = hardware.product_share.get(dtype, hardware.products.share)
    # A sequence without tokens has no attention.
    return hardware.peak(dtype) * share / float(model.flops_per_token(0))


def show_search(result: SearchResult, hardware: Hardware) -> str:
    """The best plans, the Pareto front of memory against time, and what was dropped."""
    timed = f"{len(result.found):,} of {result.num_candidates:,} plans were timed"
    lines = [timed if result.is_complete else f"interrupted: {timed}"]
    if not result.is_complete:
        lines.append("  memory is that of eager blocks; offload and layouts come last")
    if any(one.changes.get(CP, 1) > 1 for one in result.best):
        lines.append(
            "  with context parallelism, steps are planned too fast (docs/plan_published.md)"
        )
    if result.most_tokens_per_second and result.best:
        most = result.most_tokens_per_second
        lines.append(
            f"  products alone allow {format_count(most)} tokens/s/rank, "
            f"{most / result.best[0].tokens_per_second - 1:.0%} more than the fastest"
        )
    lines += [f"  {count:,} dropped: {why}" for why, count in result.dropped.most_common()]
    for one in result.failures:
        lines.append(f"  error in {describe(one.changes)}: {one.error}")
    lines = [folded(line, sys.stdout, " " * 4) for line in lines]
    if not result.found:
        why = f"fits the memory of {hardware.name}" if result.is_complete else "was found so soon"
        return "\n".join([*lines, "", f"no plan {why}"])
    lines += ["", "the fastest", *_rows(result.best)]
    lines += ["", "the fastest for their memory", *_rows(result.front)]
    return "\n".join(lines)


def _rows(plans: Sequence[FoundPlan]) -> Iterator[str]:
    """A table; on a narrow terminal each plan stands below its figures."""
    is_narrow = 0 < terminal_width(sys.stdout, 0) < PLAN_COLUMN + LEAST_PLAN
    indent, between = " " * (4 if is_narrow else PLAN_COLUMN), "\n    " if is_narrow else "  "
    rows = [("tokens/s/rank", "step", "MFU", "memory", "bubble", "plan")]
    for one in plans:
        mfu = "" if one.mfu is None else f"{one.mfu:.1%}"
        rate, seconds = format_count(one.tokens_per_second), format_seconds(one.seconds)
        memory, bubble = format_bytes(one.peak_bytes), f"{one.bubble:.0%}"
        rows.append((rate, seconds, mfu, memory, bubble, describe(one.changes)))
    for *figures, plan in rows:
        row = "  {:>13} {:>9} {:>6} {:>9} {:>6}".format(*figures)
        yield folded(row + between + plan, sys.stdout, indent)


def search_figures(result: SearchResult, hardware: Hardware) -> dict[str, Any]:
    """A search as values that JSON can hold, the fastest plan first."""
    plans = [asdict(one) for one in result.sorted()]
    for plan in plans:
        del plan["least_seconds"]  # of use to the search alone
    return {
        "plans": plans,
        "memory_bytes": hardware.memory.num_bytes,
        "num_candidates": result.num_candidates,
        "most_tokens_per_second": result.most_tokens_per_second,
        "is_complete": result.is_complete,
        "dropped": dict(result.dropped),
    }


def write_toml(config: JobConfig) -> str:
    """The keys of a job that are set, as TOML."""
    lines: list[str] = []

    def write(name: str, values: Mapping[str, Any]) -> None:
        plain = {k: v for k, v in values.items() if v is not None and not isinstance(v, dict)}
        if plain:
            lines.append(f"[{name}]")
            lines.extend(f"{show_name(key)} = {show(value)}" for key, value in plain.items())
            lines.append("")
        for key, value in values.items():
            if isinstance(value, dict) and value:
                write(f"{name}.{show_name(key)}", value)

    # The file that was read is no part of the job.
    dumped = config.model_dump(mode="json", exclude_unset=True, exclude={"job": {"config_file"}})
    for section, values in dumped.items():
        write(section, values)
    return "\n".join(lines)
