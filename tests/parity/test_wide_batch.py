"""A batch may have more than tokens and targets, and its own loss: every plan trains it alike."""

from typing import Any

import pytest
import torch
from training import CP, FEW_STEPS, PP, TP, JobConfig, Sections, differences, train

from titanlite.config import resolve_job
from titanlite.errors import ConfigError
from titanlite.job import build_job
from titanlite.modules.batch import make_batch
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import open_world
from titanlite.registry import DATASETS
from titanlite.tools.sample.generate import NoSamplesError, sample_sequences
from titanlite.tools.verify.shrink import shrink
from titanlite.tools.verify.verify import Verifier
from titanlite.training.loss import NEXT_TOKEN

JOB: Sections = {
    "model": {"name": "wide", "flavor": "small"},
    "experimental": {"custom_import": "wide_model"},
    "training": {
        "dataset": "weighted",
        "seq_len": 24,
        "dtype": "float64",
        "local_batch_size": 4,
        "global_batch_size": 8,
        "steps": FEW_STEPS,
    },
    "lr_scheduler": {"warmup_steps": 2},
    "activation_checkpoint": {"mode": "none"},
    "validation": {"enable": True, "local_batch_size": 4},
}
PLANS: dict[str, dict[str, Any]] = {
    "PP": PP,
    "CP": CP | {"context_parallel_load_balancer": "striped"},
    "FSDP": {"data_parallel_shard_degree": 2},
    "TP": TP | {"disable_loss_parallel": True},
}


def config(plan: dict[str, Any], **training: Any) -> Any:
    sections = {**JOB, "training": JOB["training"] | training, "parallelism": plan}
    return JobConfig.from_dict(sections)


def test_every_plan_trains_alike() -> None:
    (reference,) = train([config({})])
    trained = train([config(plan) for plan in PLANS.values()])
    for name, training in zip(PLANS, trained, strict=True):
        for what, difference in differences(training, reference).items():
            assert difference < 1e-11, f"{name}: {what}: {difference:.1e}"


def test_verify_takes_a_loss_that_counts_by_itself(verifier: Verifier) -> None:
    found = verifier.verify(config(PLANS["FSDP"]), steps=2)
    assert found.agrees, found.findings


def evaluate(place: Place, plan: dict[str, Any]) -> float:
    with open_world(place) as world:
        return build_job(resolve_job(config(plan), world.size), world).evaluate()


def test_validation_counts_by_the_loss_and_leaves_fillers_out() -> None:
    (alone,) = spawn(evaluate, 1, {}, timeout_seconds=120)
    both = spawn(evaluate, 2, PP | {"data_parallel_shard_degree": 1}, timeout_seconds=120)
    assert both == pytest.approx([alone, alone], rel=1e-12)


@pytest.fixture
def no_data_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DATASETS, "packed_documents", raising=False)


@pytest.mark.usefixtures("no_data_of_other_tests")
def test_length_is_the_jobs_own() -> None:
    job = resolve_job(config({}))
    assert job.seq_len == 24
    assert resolve_job(config({}, seq_len=40)).seq_len == 40
    with pytest.raises(ConfigError) as caught:
        config({}, dataset="digits")
    assert caught.value.problems == (
        'training.dataset: "digits" has images of 8 x 8 x 1 and 17 values, but the model takes '
        '24 tokens and 17; set training.dataset to "synthetic" or "weighted", or '
        "training.seq_len to 64",
    )
    # Pixels are tokens like others, for a model that knows of no images.
    assert resolve_job(config({}, dataset="digits", seq_len=None)).seq_len == 64


def test_a_validation_set_has_the_fields_of_the_training_set() -> None:
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_dict({**JOB, "validation": {"enable": True, "dataset": "synthetic"}})
    assert caught.value.problems == (
        'validation.dataset: "synthetic" has the fields tokens, but "weighted" has label, levels, '
        "targets, tokens, weights; give a data set with the same fields and loss",
    )


@pytest.mark.usefixtures("no_data_of_other_tests")
def test_a_model_without_images_prints_which_data_it_can_read() -> None:
    with pytest.raises(ConfigError) as caught:
        config({}, dataset="photos")
    assert caught.value.problems == (
        'training.dataset: "photos" has images of at most 427 x at most 64 x 3 and 256 values, '
        'but the model takes 24 tokens and 17; set training.dataset to "synthetic" or "weighted"',
    )


def test_a_job_with_fields_of_its_own_is_shrunk_on_its_own_data() -> None:
    small, told = shrink(config({}, seq_len=128))
    assert small.training.dataset == "weighted"
    assert resolve_job(small).seq_len == 32
    assert "seq_len 128 -> 32" in told


def sample(place: Place) -> str:
    with open_world(place) as world:
        job = build_job(resolve_job(config(PP), world.size), world)
        with pytest.raises(NoSamplesError) as caught:
            sample_sequences(job, 2)
        return str(caught.value)


def test_what_sampled_tokens_do_not_have_is_said_on_every_rank() -> None:
    said = spawn(sample, 2, timeout_seconds=120)
    assert said == ["the model takes `levels`, which sampling cannot provide"] * 2


def test_a_loss_compiles() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    compiled = NEXT_TOKEN.compiled("aot_eager")
    graphs = CompileCounterWithBackend("aot_eager")
    counted = NEXT_TOKEN.compiled(graphs)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batch = make_batch(torch.randint(17, (2, 8), generator=generator))
        logits = torch.randn(2, 8, 17, generator=generator)
        assert torch.allclose(compiled.total(logits, batch), NEXT_TOKEN.total(logits, batch))
        counted.total(logits, batch)
    assert graphs.frame_count == 1
