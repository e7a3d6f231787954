"""A traced step has the communication and the memory of a real one on gloo ranks."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.allocator import PEAK_CALLS, has_avx512_bf16, peak_bounds
from tests.benchmarks.communication import PARALLELISM, make_job_config
from titanlite.config import JobConfig, ResolvedJob, parse_args, resolve_job
from titanlite.config.load import override
from titanlite.ranks.launch import Place, spawn
from titanlite.tools.planner.composition import uses_fsdp
from titanlite.tools.planner.events import (
    FROM_RANK_TO_RANK,
    Allocation,
    Communication,
    Event,
    Operator,
    Wait,
)
from titanlite.tools.planner.trace import trace_rank
from titanlite.tools.verify.matrix import job_of, name_of, plans_of

CONFIGS = Path(__file__).parents[2] / "configs"

CP, TP, PP, SHARD = (
    f"{axis}_degree"
    for axis in ("context_parallel", "tensor_parallel", "pipeline_parallel", "data_parallel_shard")
)
RING = "context_parallel_rotate_method"
LAYOUT = "context_parallel_load_balancer"
WITH_CP: dict[str, dict[str, Any]] = {
    "cp4": {CP: 4, SHARD: 1},
    "cp4_contiguous": {CP: 4, SHARD: 1, LAYOUT: "none"},
    "cp4_allgather": {CP: 4, SHARD: 1, RING: "allgather"},
    "cp2_tp2": {CP: 2, TP: 2, SHARD: 1},
    "cp2_fsdp2": {CP: 2, SHARD: 2},
    "pp2_cp2": {PP: 2, CP: 2, SHARD: 1},
}
GATHERED = {"enable_fsdp_float8_all_gather": True}
PRECOMPUTED = {**GATHERED, "precompute_float8_dynamic_scale_for_fsdp": True}
# The parallelism, and the settings of float8.
WITH_FLOAT8: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp4_float8": ({SHARD: 4}, GATHERED),
    "tp2_fsdp2_float8": ({TP: 2, SHARD: 2}, PRECOMPUTED),
    "tp4_float8_rowwise": ({TP: 4, SHARD: 1}, {"recipe_name": "rowwise"}),
}
# A plan, compiled by a backend that fuses nothing.
COMPILED = ("fsdp4", "tp2_fsdp2", "fsdp4+full", "tp4+full")
SUFFIX = "_compiled"
# A plan with CPU offload; its bfloat16 casts are of one shard at a time.
OFFLOADED = ("hsdp2x2", "pp2_fsdp2")
OFFLOAD_SUFFIX = "_offload_bf16"
PLANS = [
    *PARALLELISM,
    *(f"{plan}+{mode}" for plan in ("tp4", "tp4_async", "fsdp4") for mode in ("full", "op")),
    *WITH_CP,
    *WITH_FLOAT8,
    *(f"{plan}{SUFFIX}" for plan in COMPILED),
    *(f"{plan}{OFFLOAD_SUFFIX}" for plan in OFFLOADED),
]


# Their products take oneDNN's scratch memory, which depends on the processor.
LOW_PRECISION = "_bf16"

QUICK = ["ddp4", "hsdp2x2", "tp4_async+op", "pp2_cp2", "pp2_zbv", "tp2_fsdp2_float8"]

# Operators that only one of trace and run has: data of zeros; gloo's own copies; values that are
# read.
OF_ONE = ("aten::zeros", "aten::copy_", "aten::_local_scalar_dense")
# The recorder does not see what runs with a random state in a real compiled graph.
WITH_RANDOM_STATE = "aten::_scaled_dot_product_flash_attention_for_cpu"


def config_of(plan: str) -> JobConfig:
    if plan.endswith(SUFFIX):
        changes = {"compile.enable": True, "compile.backend": "aot_eager"}
        return override(config_of(plan.removesuffix(SUFFIX)), changes)
    if plan.endswith(OFFLOAD_SUFFIX):
        changes = {
            "training.enable_cpu_offload": True,
            "training.mixed_precision_param": "bfloat16",
        }
        return override(config_of(plan.removesuffix(OFFLOAD_SUFFIX)), changes)
    if plan in WITH_CP:
        training = {"dataset": "synthetic", "global_batch_size": 8, "local_batch_size": 4}
        return JobConfig.from_dict(
            {
                "model": {"flavor": "debug"},
                "training": training,
                "parallelism": WITH_CP[plan],
                "activation_checkpoint": {"mode": "none"},
            }
        )
    if plan in WITH_FLOAT8:
        parallelism, float8 = WITH_FLOAT8[plan]
        return JobConfig.from_dict(
            {
                # A vocabulary of 32, since a float8 product needs a multiple of 16.
                "model": {
                    "flavor": "debug",
                    "vocab_size": 32,
                    "converters": ["quantize.linear.float8"],
                },
                "quantize": {"linear": {"float8": {"emulate": True, **float8}}},
                "training": {"dataset": "synthetic", "global_batch_size": 8, "local_batch_size": 2},
                "parallelism": parallelism,
                "activation_checkpoint": {"mode": "none"},
            }
        )
    return make_job_config(plan, microbatches=1 if "pp" in plan else 2)


Recorded = tuple[list[Event], tuple[int, int]]
COMPARED = (0, 3)


def run_and_record(
    place: Place, configs: list[JobConfig], compared: tuple[int, ...], has_peaks: bool
) -> list[Recorded]:
    """What step 2 of real jobs does, without its memory; and bounds of the peak of a step.

    Only on the ranks that are compared, since recording is slow.
    """
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world
    from titanlite.tools.planner.recorder import StepRecorder
    from titanlite.tools.planner.trace import axes_of_groups
    from titanlite.tools.verify.gloo import share_device

    share_device()
    # The planner's scratch memory is that of AVX-512.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    found = []
    with open_world(place) as world:
        for config in configs:
            # What was compiled for another job has other shapes.
            torch.compiler.reset()
            job = build_job(resolve_job(config, world.size), world)
            job.step()
            if world.rank not in compared:
                for _ in range(1 + (PEAK_CALLS if has_peaks else 0)):
                    job.step()
                found.append(([], (0, 0)))
                continue
            recorder = StepRecorder(axes_of_groups(job), is_fake=False)
            with recorder.watching(job.trainer.parts):
                job.step()
            peak = peak_bounds(job.step) if has_peaks else (0, 0)
            events = [event for event in recorder.events if not isinstance(event, Allocation)]
            found.append((events, peak))
    return found


def measure(plans: list[str]) -> dict[str, list[Recorded]]:
    """For each plan what each rank of a real run does, and its peak."""
    configs = [config_of(plan) for plan in plans]
    of_ranks = spawn(run_and_record, 4, configs, COMPARED, True, timeout_seconds=1180)
    return {plan: [of[index] for of in of_ranks] for index, plan in enumerate(plans)}


def check_plans(plans: list[str]) -> None:
    lower: dict[tuple[str, int], tuple[int, int, int]] = {}
    for plan, of_ranks in measure(plans).items():
        resolved = resolve_job(config_of(plan), 4)
        for rank in COMPARED:
            trace = trace_rank(resolved, rank)
            events, (low, high) = of_ranks[rank]
            calls = [event for event in events if isinstance(event, Communication)]
            assert [told(c) for c in trace.communications] == [told(c) for c in calls], plan
            assert order_of(trace.events, resolved) == order_of(events, resolved), plan
            extra = trace.peak().num_bytes - sum(trace.held.values())
            if has_avx512_bf16() or not plan.endswith(LOW_PRECISION):
                assert 0.995 * low <= extra, (plan, low, extra, high)
                if extra > 1.005 * high:
                    lower[plan, rank] = low, extra, high
            sizes = dict(trace.sizes)
            for event in trace.events:
                if isinstance(event, Allocation):
                    sizes[event.block] = event.num_bytes
            assert sum(sizes.values()) == sum(trace.sizes.values()), f"{plan}: memory is not freed"
    # A run holds less where gloo's threads, in no order, drop tensors early in all of its steps.
    for _ in range(3 if lower else 0):
        again = measure(list(dict.fromkeys(plan for plan, _ in lower)))
        lower = {
            (plan, rank): one
            for (plan, rank), one in lower.items()
            if one[1] > 1.005 * again[plan][rank][1][1]
        }
        if not lower:
            break
    assert not lower, "planned peaks that no run reaches"


def order_of(events: Iterable[Event], resolved: ResolvedJob) -> list[tuple[Any, ...]]:
    """The operators, communications and waits of a step, in order.

    A wait has the position of its communication among all. Those of DDP are left out: its reducer
    waits in C++.
    """
    config = resolved.config
    is_recomputed = config.compile.enable and config.activation_checkpoint.mode == "full"
    unseen = OF_ONE + ((WITH_RANDOM_STATE,) if is_recomputed else ())
    reduced = () if uses_fsdp(resolved) else ("dp_replicate",)
    found: list[tuple[Any, ...]] = []
    position: dict[int, int] = {}
    for event in events:
        if isinstance(event, Communication):
            if event.axis not in reduced:
                position[event.number] = len(position)
            found.append(told(event))
        elif isinstance(event, Wait) and event.number in position:
            found.append(("wait", position[event.number]))
        elif isinstance(event, Operator) and event.name not in unseen:
            found.append((event.name, event.shape))
    return found


def without_operators(events: Iterable[Event]) -> list[Event]:
    """A router's and Hugging Face's operators depend on values."""
    return [event for event in events if not isinstance(event, Operator)]


def told(one: Communication) -> tuple[Any, ...]:
    return one.kind, one.axis, one.num_bytes, one.num_ranks, one.peer


@pytest.mark.slow
def test_a_trace_is_a_run() -> None:
    check_plans(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_trace_of_any_plan_is_a_run() -> None:
    check_plans([plan for plan in PLANS if plan not in QUICK])


# The plans of the matrix of 8 ranks are run in 16 parts, each with its own ranks.
NUM_RANKS, NUM_PARTS = 8, 16


def check_communication(configs: dict[str, JobConfig], num_ranks: int) -> None:
    """The calls of the first, a middle and the last rank are those of the real run."""
    jobs, compared = list(configs.values()), (0, num_ranks // 2, num_ranks - 1)
    of_ranks = spawn(run_and_record, num_ranks, jobs, compared, False, timeout_seconds=580)
    for index, (name, config) in enumerate(configs.items()):
        resolved = resolve_job(config, num_ranks)
        for rank in set(compared):
            trace, (events, _) = trace_rank(resolved, rank), of_ranks[rank][index]
            calls = [event for event in events if isinstance(event, Communication)]
            assert [told(c) for c in trace.communications] == [told(c) for c in calls], (name, rank)
            traced, done = map(without_operators, (trace.events, events))
            assert order_of(traced, resolved) == order_of(done, resolved), (name, rank)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_plans_of_the_matrix_communicate_as_they_are_traced(part: int) -> None:
    choices = plans_of(NUM_RANKS)[part::NUM_PARTS]
    check_communication({name_of(choice): job_of(choice) for choice in choices}, NUM_RANKS)


@pytest.mark.slow
def test_balanced_experts_communicate_as_they_are_traced() -> None:
    """Also if the group of ep, or that of the experts' shards, is the group of all ranks."""
    balanced = [f"--job.config_file={CONFIGS / 'moe_ep4.toml'}", "--model.flavor=moe_debug"]
    balanced += ["--debug.moe_force_load_balance=true"]
    degrees = {
        "ep4": (),
        "tp2 x fsdp2, ep2": (2, 2, 2),
        "tp2 x fsdp2, ep4": (2, 2, 4),
        "tp4": (4, 1, 1),
    }
    names = ("tensor_parallel", "data_parallel_shard", "expert_parallel")
    configs = {}
    for plan, values in degrees.items():
        keys = [f"--parallelism.{n}_degree={v}" for n, v in zip(names, values, strict=False)]
        configs[plan] = parse_args([*balanced, *keys])
    check_communication(configs, 4)


@pytest.mark.slow
def test_shipped_jobs_communicate_as_they_are_traced() -> None:
    """All but one that fetches a data set, one that waits for a compiler, and one with experts.

    In the last one, the bytes of the all-to-alls depend on the router: see the test before.
    """
    others = {"cifar10", "compile", "moe_ep4"}
    names = {path.stem for path in CONFIGS.glob("*.toml")} - others
    by_ranks: dict[int, dict[str, JobConfig]] = {}
    for name in sorted(names):
        config = parse_args([f"--job.config_file={CONFIGS / name}.toml"])
        by_ranks.setdefault(resolve_job(config, None).dims.world_size, {})[name] = config
    for size, configs in by_ranks.items():
        check_communication(configs, size)


@pytest.mark.slow
def test_models_of_hugging_face_communicate_as_they_are_traced() -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 17, "max_position_embeddings": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    values = {**sizes, **heads, "hidden_size": 64, "intermediate_size": 128}
    configs = {}
    for parallelism in ({TP: 2, SHARD: 2}, {PP: 2, CP: 2, SHARD: 1}):
        configs[str(parallelism)] = JobConfig.from_dict(
            {
                "model": {"name": "hf", "config_class": "LlamaConfig", "values": values},
                "training": {"dataset": "digits", "global_batch_size": 8, "local_batch_size": 2},
                "activation_checkpoint": {"mode": "none"},
                "parallelism": parallelism,
            }
        )
    check_communication(configs, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "axis", "changes"),
    [
        ("ddp4", "dp_replicate", {}),
        ("fsdp4", "dp_shard", {}),
        ("tp4", "tp", {}),
        ("cp4", "cp", {}),
        ("cp4_contiguous", "cp", {"peak"}),
        ("tp2_fsdp2", "dp_shard", {}),
        ("pp2_fsdp2", "dp_shard", {}),
    ],
)
def test_the_first_rank_of_an_axis_stands_for_the_others(
    plan: str, axis: str, changes: set[str]
) -> None:
    """It sends as much as the last one, and holds at least as much.

    A contiguous ring is the exception: there the last rank has the most keys.
    """
    resolved = resolve_job(config_of(plan), 4)
    first, last = (
        trace_rank(resolved, resolved.dims.rank(**{axis: place}))
        for place in (0, resolved.dims.degrees[axis] - 1)
    )
    collectives = (
        [one for one in trace.totals().items() if one[0][0] not in FROM_RANK_TO_RANK]
        for trace in (first, last)
    )
    assert next(collectives) == next(collectives)
    for category in ("parameters", "optimizer state"):
        assert first.held[category] >= last.held[category]
    is_larger = first.peak().num_bytes >= last.peak().num_bytes
    assert is_larger == ("peak" not in changes)
    assert (first.flops >= last.flops) == ("peak" not in changes)
