"""Models with experts train as on one process, under every plan."""

from typing import Any

import pytest
from training import CP, PP, REPLICATE, SHARD, TP, Sections, merged

from titanlite.config import JobConfig
from titanlite.tools.verify.verify import Verifier

JOB: Sections = {
    "model": {"name": "llama3", "flavor": "moe_debug"},
    "training": {
        "dataset": "synthetic",
        "seq_len": 32,
        "local_batch_size": 2,
        "global_batch_size": 8,
        "steps": 20,
    },
    "lr_scheduler": {"warmup_steps": 2},
    "activation_checkpoint": {"mode": "none"},
    "parallelism": {"data_parallel_shard_degree": 1},
}
WHOLE, HALF, ONE = ({"training": {"local_batch_size": size}} for size in (8, 4, 1))
FULL: Sections = {"activation_checkpoint": {"mode": "full"}}
BY_OPERATOR: Sections = {
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}
}
COMPILE: Sections = {"compile": {"enable": True, "backend": "aot_eager"}}
OFFLOAD: Sections = {"training": {"enable_cpu_offload": True}}
VALIDATE: Sections = {"validation": {"enable": True, "freq": 1, "steps": 1}}
FORCED: Sections = {"debug": {"moe_force_load_balance": True}}
FLOAT8: Sections = {
    "model": {"converters": ["quantize.linear.float8"], "moe_num_experts": 16},
    "quantize": {"linear": {"float8": {"emulate": True}}},
}
FOUR_BLOCKS: Sections = {"model": {"n_layers": 4}}
LLAMA4: Sections = {
    "model": {
        "n_layers": 4,
        "moe_interleave_layer_step": 2,
        "moe_n_dense_layers": 0,
        "moe_score_before_experts": True,
        "moe_top_k": 1,
        "moe_route_norm": False,
    }
}
MIXTRAL: Sections = {
    "model": {
        "moe_n_dense_layers": 0,
        "moe_num_shared_experts": 0,
        "moe_score_func": "softmax",
        "moe_top_k": 2,
        "moe_load_balance_coeff": None,
    }
}
CAPACITY: Sections = {"model": {"moe_capacity_factor": 0.9}}
TWO_EXPERTS: Sections = {"model": {"moe_num_experts": 2, "moe_top_k": 1}}


def ep(degree: int) -> dict[str, int]:
    return {"expert_parallel_degree": degree}


def schedule(name: str) -> dict[str, str]:
    return {"pipeline_parallel_schedule": name}


def job(plan: dict[str, Any], *more: Sections) -> JobConfig:
    return JobConfig.from_dict(merged(JOB, {"parallelism": plan}, *more))


PLANS: dict[str, JobConfig] = {
    "FSDP, EP": job(SHARD | ep(2), FULL, VALIDATE),
    "TP, CP, EP": job(TP | CP | ep(4), WHOLE, BY_OPERATOR),
    "TP, CP, EP, capacity": job(TP | CP | ep(4), WHOLE, CAPACITY),
    "TP": job(TP, WHOLE),
    "CP": job(CP, WHOLE),
    "PP in a V, EP": job(PP | SHARD | ep(2) | schedule("ZBVZeroBubble"), HALF, FOUR_BLOCKS),
}
SLOW_PLANS: dict[str, JobConfig] = {
    "accumulation": job({}),
    "capacity, FSDP, EP": job(SHARD | ep(2), ONE, FULL, CAPACITY),
    "capacity, PP, EP": job(PP | SHARD | ep(2), HALF, BY_OPERATOR, CAPACITY),
    "capacity, CP, Llama 4": job(CP | SHARD | ep(4), LLAMA4, CAPACITY),
    "DDP": job(REPLICATE),
    "FSDP": job(SHARD, BY_OPERATOR),
    "PP": job(PP, HALF),
    "TP, FSDP": job(TP | SHARD),
    "TP, replicas": job(TP | REPLICATE),
    "TP, EP": job(TP | ep(2), WHOLE),
    "CP, EP": job(CP | ep(2), WHOLE),
    "TP 4, EP 2": job({"tensor_parallel_degree": 4} | ep(2), WHOLE),
    "FSDP 4, EP 2": job({"data_parallel_shard_degree": 4} | ep(2), BY_OPERATOR),
    "FSDP 4, EP 2 by rows": job({"data_parallel_shard_degree": 4} | ep(2), TWO_EXPERTS),
    "FSDP 4, EP 4": job({"data_parallel_shard_degree": 4} | ep(4), MIXTRAL, OFFLOAD),
    "TP, FSDP, EP 2": job(TP | SHARD | ep(2), OFFLOAD),
    "TP, FSDP, EP 4": job(TP | SHARD | ep(4), LLAMA4),
    "HSDP, EP": job(REPLICATE | SHARD | ep(2)),
    "kept gathered": job(SHARD | TP | ep(2) | {"fsdp_reshard_after_forward": "never"}, FULL),
    "freed at once": job(SHARD | TP | ep(2) | {"fsdp_reshard_after_forward": "always"}, FULL),
    "PP, EP by operator": job(PP | SHARD | ep(2), HALF, BY_OPERATOR),
    "V, recomputed": job(PP | SHARD | ep(2) | schedule("ZBVZeroBubble"), HALF, FOUR_BLOCKS, FULL),
    "GPipe": job(PP | TP | ep(2) | schedule("GPipe"), HALF),
    "interleaved": job(PP | SHARD | ep(2) | schedule("Interleaved1F1B"), HALF, FOUR_BLOCKS),
    "LoopedBFS": job(PP | SHARD | ep(2) | schedule("LoopedBFS"), HALF, FOUR_BLOCKS),
    "zero bubble": job(PP | CP | ep(2) | schedule("InterleavedZeroBubble"), WHOLE, FOUR_BLOCKS),
    "DualPipeV": job(PP | SHARD | ep(2) | schedule("DualPipeV"), HALF, FOUR_BLOCKS),
    "async TP": job(TP | ep(2) | {"enable_async_tensor_parallel": True}, WHOLE),
    "tied": job(TP | ep(2), WHOLE, {"model": {"tie_embeddings": True}}),
    "float8": job(TP | ep(2), WHOLE, FLOAT8),
    "forced": job(CP | TP | ep(2), WHOLE, FORCED),
    "eight ranks": job(CP | TP | SHARD | ep(4)),
    "eight ranks in stages": job(PP | TP | SHARD | ep(4), HALF),
    "eight ranks in replicas": job(REPLICATE | SHARD | TP | ep(4), ONE),
    "compiled": job(SHARD | ep(2), COMPILE, FULL),
    "compiled TP": job(SHARD | TP | ep(4), COMPILE, BY_OPERATOR),
    "compiled stages": job(PP | CP | ep(2), HALF, COMPILE),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_agrees(verifier: Verifier, plan: str) -> None:
    found = verifier.verify(PLANS[plan], steps=2)
    assert found.agrees, found.findings


@pytest.mark.slow
@pytest.mark.parametrize("plan", SLOW_PLANS)
def test_more_plans_agree(verifier: Verifier, plan: str) -> None:
    found = verifier.verify(SLOW_PLANS[plan], steps=3, reloads=True)
    assert found.agrees, found.findings


@pytest.mark.slow
def test_twenty_steps_agree(verifier: Verifier) -> None:
    found = verifier.verify(job(TP | SHARD | ep(4)), steps=20)
    assert found.agrees, found.findings
    assert max(max(of_step.values()) for of_step in found.differences) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_is_judged_by_the_references_own_rounding(
    verifier: Verifier, dtype: str
) -> None:
    found = verifier.verify(job(TP | CP | ep(4), WHOLE), steps=2, dtype=dtype)
    assert found.agrees, found.findings


@pytest.mark.slow
def test_replayed_routing_leaves_only_rounding(verifier: Verifier) -> None:
    """In bfloat16, tokens with close scores go elsewhere, which changes gradients of experts."""
    largest = {}
    for replay in (False, True):
        found = verifier.verify(job(SHARD | ep(2), FULL), steps=3, dtype="bfloat16", replay=replay)
        assert found.agrees, found.findings
        assert found.moved
        assert all(" elsewhere, first token " in line for line in found.moved)
        largest[replay] = max(
            difference
            for of_step in found.differences
            for (kind, name), difference in of_step.items()
            if kind == "gradient" and ".experts." in name
        )
    assert largest[True] < 0.05 < largest[False]
