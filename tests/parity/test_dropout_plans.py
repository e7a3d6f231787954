"""Dropout by TokenDropout is no plan's business: masks are those of one process."""

import pytest
from training import debug_config, train

from titanlite.tools.verify.verify import Verifier

DROPOUT = {"model": {"dropout": 0.3}, "training": {"local_batch_size": 4}}
PLANS = {
    "tp2 x cp2, recomputed": {
        "parallelism": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
        "activation_checkpoint": {"mode": "full"},
    },
    "pp2 x fsdp2, accumulation": {
        "parallelism": {
            "pipeline_parallel_degree": 2,
            "data_parallel_shard_degree": 2,
            # Sequences and tokens are transposed in the model, which one sequence would not show.
            "pipeline_parallel_microbatch_size": 2,
        },
        "training": {"global_batch_size": 16},
    },
    "fsdp2, compiled": {
        "parallelism": {"data_parallel_shard_degree": 2},
        "compile": {"enable": True, "backend": "aot_eager"},
    },
}


@pytest.mark.parametrize(
    "plan", [pytest.param(n, marks=[pytest.mark.slow] * (n == "fsdp2, compiled")) for n in PLANS]
)
def test_plans_agree(plan: str, verifier: Verifier) -> None:
    found = verifier.verify(debug_config(DROPOUT, PLANS[plan]), steps=3)
    assert found.agrees, found.findings


def test_it_is_in_force() -> None:
    with_it, without = train([debug_config(DROPOUT, {"training": {"steps": 1}}), debug_config()])
    assert abs(with_it.losses[0] - without.losses[0]) > 1e-5
