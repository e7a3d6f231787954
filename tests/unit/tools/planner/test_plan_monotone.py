"""What cannot hurt makes no plan or search worse: a faster link or chip, fewer blocks."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config import JobConfig, ResolvedJob, resolve_job
from titanlite.tools.planner.compose import compose, peaks
from titanlite.tools.planner.composition import Pieces
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.hardware import Hardware, load_hardware
from titanlite.tools.planner.pieces import trace_pieces
from titanlite.tools.planner.predict import predict
from titanlite.tools.planner.search import search
from titanlite.tools.planner.space import CP, Space

SIZES = {"dim": 1024, "n_heads": 8, "n_kv_heads": 8, "vocab_size": 4096}
DEGREES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel")
# Degrees, and with a pipeline of 4 its schedule.
PLANS = (
    ((1, 32, 2, 1), ""),
    ((4, 8, 1, 1), ""),
    ((1, 8, 1, 4), ""),
    ((1, 4, 2, 1), "1F1B"),
    ((2, 4, 1, 1), "Interleaved1F1B"),
)
# A transfer that starts earlier can share its link with one that the main stream waits for.
TOLERANCE = {PLANS[0]: 0.05}
# Of the hardware: a larger rate and a shorter time cannot hurt.
RATES = [(part, "bytes_per_second") for part in ("node", "fabric", "memory")]
RATES += [("products", "share"), ("attention", "forward_share")]
TIMES = [(part, "latency_seconds") for part in ("node", "fabric")]
TIMES += [("overhead", f"{what}_seconds") for what in ("launch", "kernel", "collective")]
FIGURES = RATES + TIMES
DRAWN = (
    st.integers(0, len(PLANS) - 1),
    st.lists(st.floats(0.05, 20), min_size=len(FIGURES), max_size=len(FIGURES)),
    st.integers(0, len(FIGURES) - 1),
    st.floats(1, 10),
)

MEMORY = ("memory", "num_bytes")
SEARCHED = (
    st.lists(st.floats(0.05, 20), min_size=len(FIGURES), max_size=len(FIGURES)),
    st.floats(0.02, 0.5),
    st.sampled_from([*FIGURES, MEMORY, None]),
    st.floats(1, 10),
)


def config_of(
    num_layers: int, seq_len: int, batch: int, parallelism: Mapping[str, Any]
) -> JobConfig:
    training = {"dataset": "synthetic", "local_batch_size": 8}
    return JobConfig.from_dict(
        {
            "job": {"device": "cuda"},
            "model": {"name": "llama3", "n_layers": num_layers, **SIZES},
            "training": training | {"seq_len": seq_len, "global_batch_size": batch},
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": "none"},
        }
    )


@functools.cache
def job(number: int, num_layers: int = 8) -> tuple[ResolvedJob, Pieces]:
    degrees, schedule = PLANS[number]
    parallelism = {f"{name}_degree": d for name, d in zip(DEGREES, degrees, strict=True)}
    piped = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
    plan = parallelism | (piped if schedule else {})
    resolved = resolve_job(config_of(num_layers, 256, 8 * degrees[0] * degrees[1], plan), None)
    return resolved, trace_pieces(resolved)


def planned(of: tuple[ResolvedJob, Pieces], hardware: Hardware) -> tuple[float, int]:
    """The seconds of a step, and what the fullest rank takes."""
    compositions = compose(*of)
    step = predict(of[0], compositions, Cost(hardware, of[0].dims), of[1], keeps_actions=False).step
    return step.seconds, peaks(compositions)[0]


def scaled(hardware: Hardware, part: str, key: str, factor: float) -> Hardware:
    of = getattr(hardware, part)
    return replace(hardware, **{part: replace(of, **{key: getattr(of, key) * factor})})


@pytest.mark.parametrize("examples", [15, pytest.param(2_000, marks=pytest.mark.slow)])
def test_better_hardware_never_makes_a_step_longer(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(*DRAWN)
    def check(number: int, factors: list[float], which: int, better: float) -> None:
        hardware = load_hardware("h100")
        for (part, key), factor in zip(FIGURES, factors, strict=True):
            hardware = scaled(hardware, part, key, factor)
        part, key = FIGURES[which]
        change = better if which < len(RATES) else 1 / better
        before, _ = planned(job(number), hardware)
        after, _ = planned(job(number), scaled(hardware, part, key, change))
        allowed = TOLERANCE.get(PLANS[number], 1e-9)
        assert after <= before * (1 + allowed), (PLANS[number], part, key)

    check()


def test_fewer_blocks_take_less_time_and_memory() -> None:
    longer, shorter = (planned(job(3, layers), load_hardware("h100")) for layers in (8, 4))
    assert shorter < longer
    assert shorter[1] <= longer[1]


@pytest.mark.slow
@pytest.mark.usefixtures("search_in_this_process")
@pytest.mark.timeout(1200)
def test_what_cannot_hurt_never_makes_the_answer_of_a_search_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def answer(hardware: Hardware, num_layers: int) -> float:
        space = Space(config_of(num_layers, 1024, 64, {}), 16, 8, num_layers, {CP: 1})
        found = search(space, hardware)
        return found.best[0].seconds if found.best else float("inf")

    num_found = 0

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(*SEARCHED)
    def check(factors: list[float], room: float, which: tuple[str, str] | None, by: float) -> None:
        nonlocal num_found
        hardware = scaled(load_hardware("h100"), *MEMORY, room)
        for (part, key), factor in zip(FIGURES, factors, strict=True):
            hardware = scaled(hardware, part, key, factor)
        before = answer(hardware, 8)
        better = scaled(hardware, *which, 1 / by if which in TIMES else by) if which else hardware
        after = answer(better, 8 if which else 4)
        num_found += before < float("inf")
        assert after <= before * (1 + 1e-9)

    check()
    assert num_found > 20
