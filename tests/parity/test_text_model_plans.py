"""Llama 3 and GPT-2 train as on one process, under every plan, with documents in a sequence."""

import io
from pathlib import Path
from typing import Any

import pytest
from training import CP, PP, SHARD, TP, Sections, merged

from titanlite.config import JobConfig
from titanlite.ranks.launch import Place, spawn
from titanlite.tools.verify.matrix import run_matrix
from titanlite.tools.verify.verify import Verifier

JOB: Sections = {
    "experimental": {"custom_import": "packed_documents"},
    "training": {
        "dataset": "packed_documents",
        "seq_len": 32,
        "local_batch_size": 4,
        "global_batch_size": 8,
        "steps": 20,
    },
    "lr_scheduler": {"warmup_steps": 2},
    "activation_checkpoint": {"mode": "none"},
    "parallelism": {"data_parallel_shard_degree": 1},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {"name": "llama3", "flavor": "tiny", "dim": 64},
    "llama3 tied": {"name": "llama3", "flavor": "tiny", "dim": 64, "tie_embeddings": True},
    "gpt2": {"name": "gpt2", "flavor": "tiny", "dim": 64, "dropout": 0.1},
}
STRIPED = {
    "context_parallel_load_balancer": "striped",
    "context_parallel_rotate_method": "allgather",
}


def schedule(name: str) -> dict[str, str]:
    return {"pipeline_parallel_schedule": name}


def job(model: str, plan: dict[str, Any], *more: Sections) -> JobConfig:
    return JobConfig.from_dict(merged(JOB, {"model": MODELS[model], "parallelism": plan}, *more))


WHOLE_BATCH: Sections = {"training": {"local_batch_size": 8}}
BY_OPERATOR: Sections = {"activation_checkpoint": {"mode": "selective"}}
OFFLOAD: Sections = {"training": {"enable_cpu_offload": True}}
COMPILE: Sections = {"compile": {"enable": True, "backend": "aot_eager"}}
FLOAT8: Sections = {
    "model": {"converters": ["quantize.linear.float8"]},
    "quantize": {"linear": {"float8": {"emulate": True}}},
}
ASYNC = {"enable_async_tensor_parallel": True}
PLANS: dict[str, JobConfig] = {
    "tied, TP, CP": job("llama3 tied", TP | CP | STRIPED, WHOLE_BATCH, BY_OPERATOR),
    "gpt2, PP, CP": job("gpt2", PP | CP, WHOLE_BATCH),
}
SLOW_PLANS: dict[str, JobConfig] = {
    "gpt2, TP, FSDP": job("gpt2", TP | SHARD | ASYNC, OFFLOAD),
    "tied, PP in a V": job("llama3 tied", PP | TP | schedule("ZBVZeroBubble"), WHOLE_BATCH),
    "TP 4, float8": job("llama3", {"tensor_parallel_degree": 4}, WHOLE_BATCH, FLOAT8),
    "TP, CP, compile": job("llama3", TP | CP, WHOLE_BATCH, COMPILE, BY_OPERATOR),
    "tied, TP, compile": job("llama3 tied", TP, WHOLE_BATCH, COMPILE),
    "gpt2, CP, compile": job("gpt2", CP | STRIPED, WHOLE_BATCH, COMPILE),
    "eight ranks": job("llama3 tied", PP | TP | CP | schedule("Interleaved1F1B"), WHOLE_BATCH),
    "gpt2 on eight ranks": job("gpt2", PP | TP | CP | schedule("ZBVZeroBubble"), WHOLE_BATCH),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_agrees(verifier: Verifier, plan: str) -> None:
    found = verifier.verify(PLANS[plan], steps=2)
    assert found.agrees, found.findings


def communication_of(place: Place) -> dict[str, Any]:
    from tests.benchmarks.communication import count_step, totals
    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        return {
            model: totals(count_step(job(model, TP, WHOLE_BATCH), world)[0]) for model in MODELS
        }


def test_tensor_parallelism_sends_what_its_page_says() -> None:
    """docs/tensor_parallel.md, with a vocabulary-parallel table instead of replicated ones."""
    T, B, D, L, word = 32, 8, 64, 4, 4
    (counts, _) = spawn(communication_of, 2, timeout_seconds=120)
    # A gather of q, k, v and of w1, w3 and the gradients of wo and w2, for each block; the output
    # layer's input, and the table's gradient. The same number of reduce-scatters.
    number = 4 * L + 2
    # GPT-2's norms and row-wise layers have biases, and its table of positions is replicated.
    replicated = dict.fromkeys(counts, (2 * L + 1) * D)
    replicated["gpt2"] = (2 * (2 * L + 1) + 2 * L) * D + 512 * D
    for model, of_model in counts.items():
        for kind in ("all_gather", "reduce_scatter"):
            assert of_model[kind, "tp"] == (number, number * word * T * B * D)
        # The gradients of what is replicated, and three numbers a token for the loss.
        assert of_model["all_reduce", "tp"] == (3, word * (replicated[model] + 3 * B * T))


@pytest.mark.slow
@pytest.mark.parametrize("plan", SLOW_PLANS)
def test_more_plans_agree(verifier: Verifier, plan: str) -> None:
    found = verifier.verify(SLOW_PLANS[plan], steps=2, reloads=True)
    assert found.agrees, found.findings


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_low_precision_is_judged_by_the_references_own_rounding(
    verifier: Verifier, model: str, dtype: str
) -> None:
    found = verifier.verify(job(model, TP | CP, WHOLE_BATCH), steps=2, dtype=dtype)
    assert found.agrees, found.findings


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["llama3 tied", "gpt2"])
def test_every_pair_of_features_agrees(verifier: Verifier, model: str, tmp_path: Path) -> None:
    stream = io.StringIO()
    status = run_matrix(
        num_ranks=4, folder=tmp_path, job=job(model, {}), stream=stream, verifier=verifier
    )
    assert status == 0, stream.getvalue()
