"""Verifies every legal pair of features with plans of one model: `verify --matrix`.

The model is a small image transformer, or that of a job. Of a job the model, the data and the
optimizer are taken; the plan, the batch and the clipping are the matrix's.

    features_of, plans_of    the features, and plans that together contain every legal pair of them
    run_matrix               verifies the plans, keeps the results in a file, draws the overview

Each result is appended to results.jsonl at once, so that a stopped run can resume if the code is
unchanged.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt

from titanlite.config import JobConfig, make_model_config
from titanlite.config.model import num_experts
from titanlite.config.toml import put
from titanlite.errors import ConfigError, quote
from titanlite.files import read_bytes
from titanlite.mesh.parallel_dims import AXES, GRID, axes_where, divisors
from titanlite.observe.terminal import folded, is_terminal
from titanlite.parallelize.steps import FEATURES
from titanlite.quantities import format_duration
from titanlite.schedule import SCHEDULES
from titanlite.tools.options import write
from titanlite.tools.verify.covering import Choice, cover_pairs, pairs
from titanlite.tools.verify.jobs import switch_off
from titanlite.tools.verify.junit import Case, to_junit
from titanlite.tools.verify.report import describe_key, filled
from titanlite.tools.verify.verify import Verification, Verifier

OFF = "-"
"""The value of a feature that does not apply, such as a schedule without a pipeline."""

BATCH = 16
# The largest results.jsonl that is read; a plan takes less than 1 kB.
MOST_BYTES = 256 * 2**20

VARIATIONS = {one.name: one for feature in FEATURES for one in feature.variations}
"""What the features of titanlite/parallelize vary, by name."""


def features_of(
    num_ranks: int, *, with_compile: bool = False, job: JobConfig | None = None
) -> dict[str, list[Any]]:
    """Each feature and its values, for plans of a job, or of the small model, over some ranks."""
    sizes = None if job is None else make_model_config(job)
    has_dropout = sizes is None or hasattr(sizes, "dropout")
    has_experts = job is not None and num_experts(job, sizes) > 0
    degrees = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    return {
        **{axis: degrees if axis != "pp" else [n for n in degrees if n <= 4] for axis in AXES},
        **({"ep": [OFF, *degrees[1:]]} if has_experts else {}),
        **{
            name: [OFF, *one.values] if one.needs else list(one.values)
            for name, one in VARIATIONS.items()
            if with_compile or not one.on_request
        },
        "accumulation": ["off", "on"],
        "clipping": ["on", "off"],
        **({"dropout": ["off", "on"]} if has_dropout else {}),
    }


def plans_of(
    num_ranks: int,
    *,
    with_compile: bool = False,
    seed: int = 0,
    done: Sequence[Choice] = (),
    job: JobConfig | None = None,
) -> list[Choice]:
    """Choices that together contain every pair of features that a legal plan can have.

    The legal choices of `done` come first; the others add the missing pairs.
    """
    features = features_of(num_ranks, with_compile=with_compile, job=job)
    grids = [
        grid
        for grid in itertools.product(*(features[axis] for axis in AXES))
        if math.prod(grid) == num_ranks
    ]
    known: dict[str, bool] = {}

    def draw(random_: random.Random, start: Choice) -> Choice:
        """Draw degrees that match `start`, and values for the features that then apply."""
        fitting = [
            grid
            for grid in grids
            if all(start.get(axis, n) == n for axis, n in zip(AXES, grid, strict=True))
        ]
        # Without the axis of a feature in `start` no draw would be legal.
        for name, value in start.items():
            if (one := VARIATIONS.get(name)) is not None and one.needs:
                fitting = [
                    grid
                    for grid in fitting
                    if (value != OFF) == any(grid[AXES.index(axis)] > 1 for axis in one.needs)
                ]
        if not fitting:
            return {}
        choice = dict(zip(AXES, random_.choice(fitting), strict=True))
        for name, values in features.items():
            if name in VARIATIONS and VARIATIONS[name].needs:
                is_on = any(choice[axis] > 1 for axis in VARIATIONS[name].needs)
                choice[name] = random_.choice(list(VARIATIONS[name].values)) if is_on else OFF
            elif name not in choice:
                choice[name] = random_.choice(values)
        return choice | start

    def is_legal(choice: Choice) -> bool:
        for name, one in VARIATIONS.items():
            axes = one.value_needs.get(choice.get(name, ""), ())
            if axes and all(choice.get(axis, 1) == 1 for axis in axes):
                return False
        if not choice:
            return False
        key = repr(sorted(choice.items()))
        if key not in known:
            try:
                # All degrees are given, so making the config runs every check.
                job_of(choice, job)
                known[key] = True
            except ConfigError:
                known[key] = False
        return known[key]

    kept = [choice for choice in done if choice.keys() == features.keys() and is_legal(choice)]
    return cover_pairs(features, is_legal, seed, draw, num_draws=60, num_legal=12, start=kept)


def job_of(choice: Mapping[str, Any], job: JobConfig | None = None) -> JobConfig:
    """`job`, or the small model's, under the plan that `choice` describes; ConfigError if illegal.

    A pipeline has at least one microbatch per stage rank if possible, and otherwise as few as its
    schedule allows.
    """
    local = BATCH // math.prod(choice[axis] for axis in axes_where(batch="samples"))
    local = max(1, local // 2) if choice["accumulation"] == "on" else max(1, local)
    problems: ConfigError | None = None
    sizes = divisors(local) if choice["pp"] > 1 else [1]
    for size in sorted(sizes, key=lambda size: (local // size < choice["pp"], -size)):
        try:
            return JobConfig.from_dict(_sections_of(choice, local, size, job))
        except ConfigError as error:
            problems = error
    assert problems is not None
    raise problems


def _sections_of(
    choice: Mapping[str, Any], local_batch_size: int, microbatch_size: int, job: JobConfig | None
) -> dict[str, Any]:
    parallelism: dict[str, Any] = {axis.degree_key: choice[axis.name] for axis in GRID}
    if choice.get("ep", OFF) != OFF:
        parallelism["expert_parallel_degree"] = choice["ep"]
    num_blocks = 2
    if choice["schedule"] != OFF:
        num_blocks = choice["pp"] * SCHEDULES[choice["schedule"]].min_chunks
        parallelism |= {
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
            "pipeline_parallel_microbatch_size": microbatch_size,
        }
    values: dict[str, Any] = job.model_dump(exclude_unset=True) if job else {}
    values["parallelism"] = parallelism
    if job is None:
        # Uneven shards; of 17 values the last of 8 ranks would have none.
        vocab_size = 23 if choice["tp"] == 8 else 17
        values["model"] = {"flavor": "debug", "num_layers": num_blocks, "vocab_size": vocab_size}
        values["training"] = {"dataset": "synthetic"}
    values["training"] |= {
        "local_batch_size": local_batch_size,
        "global_batch_size": BATCH,
        "max_norm": 1.0 if choice["clipping"] == "on" else math.inf,
        "steps": 20,
    }
    values.setdefault("lr_scheduler", {"warmup_steps": 2})
    if "dropout" in choice:
        put(values, "model.dropout", 0.1 if choice["dropout"] == "on" else 0.0)
    switch_off(values, FEATURES)
    for name, one in VARIATIONS.items():
        value = choice.get(name, OFF)
        for key, setting in one.values.get(value, {}).items():
            put(values, key, setting)
        if job is None and value != next(iter(one.values)):
            values["model"] |= one.sizes
    return values


def run_matrix(
    *,
    num_ranks: int = 8,
    folder: Path,
    job: JobConfig | None = None,
    steps: int = 2,
    with_compile: bool = False,
    limit: int | None = None,
    stream: TextIO | None = None,
    verifier: Verifier | None = None,
    device_type: str = "cpu",
    threads: bool = False,
    junit: str | None = None,
) -> int:
    """Verify every plan that does not agree in `folder` yet; returns 0 if all agree, else 1.

    The plans are those of `job`, or of a small model. Writes results.jsonl, one line per plan, and
    overview.html, and the file `junit` with a test case per plan. With `limit`, only the first
    plans are run, which contain the most pairs. With `threads`, the ranks are threads of this
    process.
    """
    from titanlite.tools.verify.overview import draw_overview

    out = sys.stdout if stream is None else stream
    features = features_of(num_ranks, with_compile=with_compile, job=job)
    code = code_digest(job) + "-threads" * threads + "-cuda" * (device_type == "cuda")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results = read_results(folder, num_ranks, steps, code, features)
        lines = (folder / "results.jsonl").open("a")
    except OSError as error:
        raise ConfigError(
            f"--output: {quote(str(folder))} cannot be used ({error.strerror}); give another"
        ) from error
    as_threads = " as threads" * threads
    print(f"choosing plans of {num_ranks} ranks{as_threads}", file=out, flush=True)
    agreed = {key: result for key, result in results.items() if result["agrees"]}
    done = [result["choice"] for result in agreed.values()]
    choices = plans_of(num_ranks, with_compile=with_compile, done=done, job=job)
    if not choices:
        raise ConfigError(
            f"--matrix: the job has no legal plan on {num_ranks} ranks; give other sizes in "
            "[model], or another number of ranks"
        )
    todo = [choice for choice in choices[:limit] if _key(choice) not in agreed]
    num_done = sum(_key(choice) in agreed for choice in choices)
    counted = f"{len(choices)} plans contain all {len(set().union(*map(pairs, choices)))} legal"
    counted += f" pairs of {len(features)} features; {num_done} are done, {len(todo)} to run"
    print(folded(counted, out), file=out, flush=True)
    # The caller closes a verifier that it passes in.
    own = contextlib.nullcontext(verifier) if verifier else None
    opened = own or Verifier(device_type, threads=threads)
    began = time.monotonic()
    with opened as ranks, lines:
        # A killed run may have left an incomplete last line.
        lines.write("\n" if lines.tell() else "")
        try:
            for index, choice in enumerate(todo):
                found = ranks.verify(job_of(choice, job), steps=steps)
                result = _result(choice, found, num_ranks, steps) | {"code": code}
                results[_key(choice)] = result
                lines.write(json.dumps(result) + "\n")
                lines.flush()
                _show(out, result, index + 1, len(todo), time.monotonic() - began)
        finally:
            shown = [results[_key(choice)] for choice in choices if _key(choice) in results]
            page = draw_overview(shown, features, num_ranks, choices)
            (folder / "overview.html").write_text(page, encoding="utf-8")
            if junit:
                write(junit, to_junit([_case(result) for result in shown]))
    wrong = [result for result in shown if not result["agrees"]]
    seconds = sum(result["seconds"] for result in shown)
    print(folded(_summary(shown, wrong, seconds), out), file=out)
    for result in wrong:
        print(f"\n{name_of(result['choice'])}\n  {result['cause']}", file=out)
    print(f"\n{folder / 'overview.html'}", file=out)
    return 1 if wrong else 0


class StoredResult(BaseModel):
    """A line of results.jsonl, exactly as `run_matrix` writes it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    choice: dict[str, str | int]
    num_ranks: PositiveInt
    steps: PositiveInt
    agrees: bool
    seconds: NonNegativeFloat
    cause: str
    code: str
    largest: NonNegativeFloat | None = None
    margin: NonNegativeFloat | None = None
    of: str | None = None


def read_results(
    folder: Path, num_ranks: int, steps: int, code: str, features: Mapping[str, Sequence[Any]]
) -> dict[str, dict[str, Any]]:
    """The results in `folder` that belong to this `code`, by the plan's key.

    A line that is not a result, or whose plan is not one of `features`, is skipped, so that its
    plan runs again. Raises OSError if results.jsonl is not a regular file.
    """
    path = folder / "results.jsonl"
    content = read_bytes(path, most_bytes=MOST_BYTES) if os.path.lexists(path) else b""
    results = {}
    for line in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            result = StoredResult.model_validate(json.loads(line))
            choice = result.choice
            is_plan = choice.keys() == features.keys() and all(
                choice[name] in values for name, values in features.items()
            )
            if is_plan and (result.num_ranks, result.steps, result.code) == (
                num_ranks,
                steps,
                code,
            ):
                results[_key(choice)] = result.model_dump(exclude_unset=True)
    return results


def code_digest(job: JobConfig | None = None) -> str:
    """A digest of what a result depends on: titanlite, the models, PyTorch's version, the job."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    if job is not None:
        digest.update(repr(sorted(job.model_dump(exclude_unset=True).items())).encode())
    for package in ("titanlite", "titanlite.models"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def name_of(choice: Mapping[str, Any]) -> str:
    """A plan in words: its degrees, and the features that are on."""
    degrees = " x ".join(f"{axis} {choice[axis]}" for axis in AXES if choice[axis] > 1)
    rest = [f"{k} {v}" for k, v in choice.items() if k not in AXES and v not in (OFF, "off")]
    return ", ".join([degrees or "one rank", *rest])


def _key(choice: Mapping[str, Any]) -> str:
    text = json.dumps(choice, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _result(choice: Choice, found: Verification, num_ranks: int, steps: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "choice": choice,
        "num_ranks": num_ranks,
        "steps": steps,
        "agrees": found.agrees,
        "seconds": round(found.seconds, 2),
        "cause": found.cause,
    }
    if found.error is not None:
        result["error"] = str(found.error)
    if found.differences:
        step, key = found.worst
        difference = found.differences[step][key]
        result["largest"] = difference if math.isfinite(difference) else None
        result["margin"] = found.margin if math.isfinite(found.margin) else None
        result["of"] = f"{describe_key(key)} at step {step}"
    return result


def _case(result: Mapping[str, Any]) -> Case:
    verdict = "DOES NOT RUN" if "error" in result else "DIFFERS"
    failure = "" if result["agrees"] else f"{verdict}: {result['cause']}"
    return Case(name_of(result["choice"]), result["seconds"], failure)


def _show(out: TextIO, result: dict[str, Any], done: int, total: int, seconds: float) -> None:
    """Print the line of a plan, and on a terminal below it for now how long the others take."""
    mark = "agrees " if result["agrees"] else "DIFFERS"
    largest = result.get("largest")
    figure = "" if largest is None else f"{largest:.0e}"
    line = f"{done:4}/{total} {mark} {figure:6} {result['seconds']:5.1f} s  "
    line += name_of(result["choice"])
    if is_terminal(out):
        print(f"\033[K{filled(line, indent=' ' * 27)}", file=out)
        left = format_duration(seconds / done * (total - done))
        line = f"{done / total:.0%} done, about {left} left" if done < total else ""
    print(line, end="\r" if is_terminal(out) else "\n", file=out, flush=True)


def _summary(shown: list[dict[str, Any]], wrong: list[dict[str, Any]], seconds: float) -> str:
    largest = max((r["largest"] for r in shown if r.get("largest") is not None), default=0.0)
    margin = min((r["margin"] for r in shown if r.get("margin") is not None), default=math.inf)
    verdict = f"{len(wrong)} differ" if wrong else "all agree"
    return (
        f"\n{len(shown)} plans, {verdict}; largest difference {largest:.1e}, "
        f"smallest margin {margin:,.0f}; {format_duration(seconds)} of verification"
    )
