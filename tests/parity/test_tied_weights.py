"""A model with tied weights trains as one process does, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
from training import (
    DEBUG_JOB,
    FEW_STEPS,
    Sections,
    Training,
    differences,
    make_config,
    merged,
    train,
)

TOLERANCE = 1e-11
JOB: Sections = {
    "experimental": {"custom_import": "tied_model"},
    "training": {"local_batch_size": 4},
}
PP, CP, TP, SHARD, REPLICATE = (
    {"pipeline_parallel_degree": 2},
    {"context_parallel_degree": 2},
    {"tensor_parallel_degree": 2},
    {"data_parallel_shard_degree": 2},
    {"data_parallel_replicate_degree": 2},
)


def pp(schedule: str, **more: Any) -> dict[str, Any]:
    return PP | {"pipeline_parallel_schedule": schedule} | more


def config(plan: Sections | dict[str, Any], model: str = "tied", steps: int = FEW_STEPS) -> Any:
    """The job of a plan: keys of [parallelism], or whole sections."""
    is_sections = all(isinstance(value, dict) for value in plan.values())
    sections = merged(DEBUG_JOB, JOB, plan if is_sections else {"parallelism": plan})
    sections["model"] = {"name": model, "flavor": "small"}
    sections["training"]["steps"] = steps
    return make_config(sections)


def with_whole_batch(parallelism: dict[str, Any]) -> Sections:
    return {"parallelism": parallelism, "training": {"local_batch_size": 8}}


ON_TWO_RANKS: dict[str, Any] = {
    "TP": TP,
    "FSDP": SHARD,
    "DDP": REPLICATE,
    "CP": CP,
    "PP": with_whole_batch(PP),
    "PP in a V, accumulation": pp("ZBVZeroBubble", pipeline_parallel_microbatch_size=1),
}
MORE_ON_TWO_RANKS: dict[str, Any] = {
    **{
        f"PP, {schedule}": with_whole_batch(pp(schedule))
        for schedule in (
            *("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"),
            *("ZBVZeroBubble", "DualPipeV", "ZB-H1", "ZB-H2"),
        )
    },
    "PP, accumulation": PP,
    "TP, logits gathered": TP | {"disable_loss_parallel": True},
    "FSDP, always": SHARD | {"fsdp_reshard_after_forward": "always"},
    "FSDP, never": SHARD | {"fsdp_reshard_after_forward": "never"},
    "FSDP, accumulation": {"parallelism": SHARD, "training": {"local_batch_size": 2}},
    "DDP, accumulation": {"parallelism": REPLICATE, "training": {"local_batch_size": 2}},
    "offload": {"parallelism": SHARD, "training": {"enable_cpu_offload": True}},
    "full AC": {"parallelism": SHARD, "activation_checkpoint": {"mode": "full"}},
    "compile": {"parallelism": SHARD, "compile": {"enable": True, "backend": "aot_eager"}},
    "compile and PP": {
        **with_whole_batch(pp("Interleaved1F1B")),
        "compile": {"enable": True, "backend": "aot_eager"},
    },
    "AC and PP": {**with_whole_batch(PP), "activation_checkpoint": {"mode": "full"}},
}
ON_FOUR_RANKS: dict[str, Any] = {
    "PP and TP": with_whole_batch(PP | TP),
    "PP and FSDP": PP | SHARD,
    "TP and FSDP": TP | SHARD,
}
MORE_ON_FOUR_RANKS: dict[str, Any] = {
    "HSDP": {"parallelism": REPLICATE | SHARD, "training": {"local_batch_size": 2}},
    "HSDP, accumulation": {"parallelism": REPLICATE | SHARD, "training": {"local_batch_size": 1}},
    "PP, four stages": with_whole_batch(PP | {"pipeline_parallel_degree": 4}),
    "PP in a V, four ranks": {
        **with_whole_batch(pp("DualPipeV") | {"pipeline_parallel_degree": 2} | TP),
    },
    "PP in a V, FSDP, accumulation": {
        "parallelism": pp("ZBVZeroBubble", pipeline_parallel_microbatch_size=1) | SHARD,
        "training": {"local_batch_size": 2},
    },
    "PP and FSDP, accumulation": {"parallelism": PP | SHARD, "training": {"local_batch_size": 2}},
    "PP and DDP, accumulation": {
        "parallelism": PP | REPLICATE,
        "training": {"local_batch_size": 2},
    },
    "PP, FSDP, offload": {
        "parallelism": PP | SHARD,
        "training": {"enable_cpu_offload": True},
    },
    "PP and CP": with_whole_batch(PP | CP),
    "CP and TP": CP | TP,
    "TP and DDP": TP | REPLICATE,
}
WITH_SEQUENCE_PARALLEL: dict[str, Any] = {
    "TP and FSDP": TP | SHARD,
    "PP and TP": with_whole_batch(PP | TP),
}
ON_EIGHT_RANKS: dict[str, Any] = {
    "PP and HSDP, accumulation": {
        "parallelism": PP | REPLICATE | SHARD,
        "training": {"local_batch_size": 2},
    },
    "PP, TP and FSDP": PP | TP | SHARD,
    "PP in a V, TP and FSDP": pp("ZBVZeroBubble") | TP | SHARD,
}


@pytest.fixture(scope="module")
def reference() -> Training:
    return train([config({})])[0]


def assert_equal(trained: dict[str, Training], reference: Training) -> None:
    for name, training in trained.items():
        found = differences(training, reference)
        wrong = {what: error for what, error in found.items() if error > TOLERANCE}
        assert wrong == {}, name
        assert len(set(training.digests)) == 1, f"{name}: ranks see different whole weights"


def trained(plans: dict[str, Any], model: str = "tied") -> dict[str, Training]:
    jobs = [config(plan, model) for plan in plans.values()]
    return dict(zip(plans, train(jobs), strict=True))


def test_on_two_ranks(reference: Training) -> None:
    assert "output.weight" not in reference.weights
    assert "tok_emb.weight" in reference.weights
    assert_equal(trained(ON_TWO_RANKS), reference)
