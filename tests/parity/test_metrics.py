"""Metrics of a validation are those of one process under every plan."""

from typing import Any

import pytest
import torch
from torch import Tensor
from training import debug_config

import titanlite
from titanlite.config import ResolvedJob, resolve_job
from titanlite.errors import ConfigError, TitanliteError
from titanlite.modules.batch import Batch, make_batch
from titanlite.ranks.world import World
from titanlite.tools.verify.pool import RankPool
from titanlite.tools.verify.verify import Verifier
from titanlite.training.metrics import accuracy, sums_of

# 20 samples in batches of 3 per rank: the last batch has rows that only fill it.
SECTIONS: dict[str, dict[str, Any]] = {
    "training": {"global_batch_size": 4},
    "validation": {
        "enable": True,
        "steps": 5,
        "local_batch_size": 3,
        "metrics": ["accuracy", "surprise"],
    },
}
PLANS = {
    "TP, loss parallel": {"tensor_parallel_degree": 2},
    "TP": {"tensor_parallel_degree": 2, "disable_loss_parallel": True},
    "CP": {"context_parallel_degree": 2},
    "FSDP": {"data_parallel_shard_degree": 2},
    "DDP": {"data_parallel_replicate_degree": 2},
    "PP": {"pipeline_parallel_degree": 2},
}


def surprise(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """The perplexity of each target, which needs all logits of its token."""
    assert type(logits) is Tensor
    is_target = batch.targets != -100
    own = batch.targets.clamp_min(0)[..., None]
    perplexities = (-logits.log_softmax(-1).gather(-1, own)[..., 0]).exp()
    return perplexities[is_target].sum(), int(is_target.sum())


@pytest.fixture
def own_metric() -> None:
    titanlite.register_metric("surprise", surprise)


def validate(world: World, resolved: ResolvedJob) -> dict[str, float]:
    from titanlite.job import build_job

    job = build_job(resolved, world)
    found = job.validate()
    # Without any target there is no mean: every rank says so, and the job can go on.
    masked = (b.replace(targets=torch.full_like(b.targets, -100)) for b in job.validation_batches())
    with pytest.raises(TitanliteError, match=r"^validation\.dataset: .* no target"):
        job.trainer.evaluate(masked)
    assert job.validate() == found
    return {"loss": found.loss, **found.metrics}


def found_by(num_ranks: int, plans: list[dict[str, Any]]) -> list[dict[str, float]]:
    found = []
    with RankPool(num_ranks, timeout_seconds=120) as pool:
        for plan in plans:
            resolved = resolve_job(debug_config(SECTIONS, {"parallelism": plan}), num_ranks)
            ranks = pool.call(validate, resolved)
            assert all(of_rank == ranks[0] for of_rank in ranks)
            found.append(ranks[0])
    return found


@pytest.mark.usefixtures("own_metric")
def test_every_plan_has_the_metrics_of_one_process() -> None:
    (reference,) = found_by(1, [{}])
    assert 0 < reference["accuracy"] < 1
    for name, found in zip(PLANS, found_by(2, list(PLANS.values())), strict=True):
        assert found == pytest.approx(reference, rel=1e-12), name


def mean_of_batch(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """The mean over a batch, counted once: depends on how samples are batched."""
    total, count = surprise(logits, batch)
    return total / count, 1


def test_verify_names_a_metric_that_depends_on_the_batches(own_metric: None) -> None:
    titanlite.register_metric("mean_of_batch", mean_of_batch)
    metrics = ["accuracy", "surprise", "mean_of_batch"]
    config = debug_config(
        SECTIONS,
        {"validation": {"metrics": metrics}, "parallelism": {"data_parallel_shard_degree": 2}},
    )
    with Verifier(timeout_seconds=120) as verifier:
        found = verifier.verify(config, steps=2)
    assert [failure.name for failure in found.failures] == ["mean_of_batch"] * 2
    assert "the metric mean_of_batch is" in found.findings[0]
    assert "Return the sum over targets and their number" in found.findings[0]


def test_masked_targets_do_not_count() -> None:
    batch = make_batch(torch.tensor([[1, 2, 0], [0, 0, 0]]))
    batch = batch.leave_out(torch.tensor([[False], [True]]))
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 1, 0], [0, 0, 0]]), 3).double()
    total, count = accuracy(logits, batch)
    assert (int(total), int(count)) == (1, 2)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        debug_config(SECTIONS)
    assert caught.value.problems == (
        'validation.metrics: no metric "surprise" is registered; give "accuracy", or set '
        "experimental.custom_import to a module that calls titanlite.register_metric",
    )
    with pytest.raises(ValueError, match="another name"):
        titanlite.register_metric("loss", surprise)
    batch = make_batch(torch.zeros(1, 2, dtype=torch.long))
    totals = torch.zeros(1, 2)
    with pytest.raises(TitanliteError, match=r"metrics: own failed.*two numbers"):
        sums_of({"own": lambda outputs, batch: outputs.sum()}, torch.ones(2), batch, totals)
