"""The same plan with a model that a laptop runs in seconds: `verify --shrink`.

Blocks, widths, sequence and batch become as small as the plan allows: a change is kept only if the
job's own checks accept it. Degrees, schedule, stages, accumulation and layout stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from titanlite.config import JobConfig, Reading, make_model_config, override, resolve_job
from titanlite.config.data import own_length
from titanlite.errors import ConfigError
from titanlite.registry import DATASETS
from titanlite.start import check_layers

# Wide enough for sums of many terms; two blocks and two sequences, so that there is a second one.
LEAST_WIDTH, LEAST_BLOCKS, LEAST_BATCH = 32, 2, 2
SYNTHETIC: dict[str, Any] = {"training.dataset": "synthetic", "training.dataset_path": None}


def generated(config: JobConfig) -> dict[str, Any]:
    """The settings that make a job train on generated data, which exists on every machine.

    Empty if the job's own data set has fields or a loss that generated data does not have.
    """
    own, other = (DATASETS.get(name) for name in (config.training.dataset, "synthetic"))
    assert other is not None
    is_alike = own is None or (own.fields, own.loss) == (other.fields, other.loss)
    return SYNTHETIC if is_alike else {}


def read_small(read: Callable[[Mapping[str, Any]], Reading]) -> tuple[Reading, list[str]]:
    """The job that `read` reads with some keys changed, made small, and each change in words."""
    # The data set of the job need not exist on this machine.
    changes = generated(read({}).config)
    reading = read(changes)
    reading.draft()
    config, words = shrink(reading.require())
    return Reading(config), [*words, *["generated data"] * bool(changes)]


def shrink(config: JobConfig) -> tuple[JobConfig, list[str]]:
    """`config` with small sizes and generated data, and each change in words."""
    small = _first(override(config, generated(config)), _batch_changes(config))
    sizes = make_model_config(config)
    for field in dataclasses.fields(sizes):
        value, key = getattr(sizes, field.name), f"model.{field.name}"
        if type(value) is int:
            small = _first(small, ({key: smaller} for smaller in _smaller(field.name, value)))
    if own_length(sizes) is None:
        lengths = _smaller("seq_len", resolve_job(config).seq_len)
        small = _first(small, ({"training.seq_len": shorter} for shorter in lengths))
    return small, _message_of(config, small)


def _smaller(name: str, value: int) -> Iterator[int]:
    """Smaller values to try for a size, the smallest first."""
    if "layer" in name or "block" in name:
        yield from range(LEAST_BLOCKS, value)
        return
    least = DATASETS["synthetic"].least_sizes.get(name, LEAST_WIDTH)
    halves = []
    while value % 2 == 0 and value // 2 >= least:
        value //= 2
        halves.append(value)
    yield from reversed(halves)


def _batch_changes(config: JobConfig) -> Iterator[dict[str, Any]]:
    """Smaller batches to try, the smallest first; accumulation and microbatches stay."""
    job = resolve_job(config)
    dims, training = job.dims, config.training
    micro = config.parallelism.pipeline_parallel_microbatch_size
    counts = [size // (training.local_batch_size * dims.dp) for _, size in job.batch_sizes]
    fewer = {count: min(count, 2 + rank) for rank, count in enumerate(sorted(set(counts)))}
    later = [step for step, _ in job.batch_sizes[1:]]
    for local in range(min(LEAST_BATCH, training.local_batch_size), training.local_batch_size):
        changes: dict[str, Any] = {
            "training.local_batch_size": local,
            "training.global_batch_size": local * dims.dp * fewer[counts[0]],
            "training.batch_size_schedule": [
                [step, local * dims.dp * fewer[count]]
                for step, count in zip(later, counts[1:], strict=True)
            ],
        }
        if dims.pp_enabled and micro > 1:
            changes["parallelism.pipeline_parallel_microbatch_size"] = 1
        yield changes


def _first(config: JobConfig, candidates: Iterable[Mapping[str, Any]]) -> JobConfig:
    """`config` with the first changes that its checks accept; unchanged if they accept none."""
    tried = (_try(config, changes) for changes in candidates)
    return next((changed for changed in tried if changed is not None), config)


def _try(config: JobConfig, changes: Mapping[str, Any]) -> JobConfig | None:
    with contextlib.suppress(ConfigError):
        changed = override(config, changes)
        check_layers(resolve_job(changed))
        return changed
    return None


def _message_of(config: JobConfig, small: JobConfig) -> list[str]:
    before, after = make_model_config(config), make_model_config(small)
    jobs = resolve_job(config), resolve_job(small)
    pairs = [
        (f.name, getattr(before, f.name), getattr(after, f.name)) for f in dataclasses.fields(after)
    ]
    for section, names in (
        ("training", ("local_batch_size", "global_batch_size")),
        ("parallelism", ("pipeline_parallel_microbatch_size",)),
    ):
        pairs += [
            (name, getattr(getattr(config, section), name), getattr(getattr(small, section), name))
            for name in names
        ]
    if own_length(after) is None:
        pairs.append(("seq_len", jobs[0].seq_len, jobs[1].seq_len))
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
