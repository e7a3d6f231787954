"""docs/losses.md: a loss over the whole batch is the loss of one process under every plan."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import write_example

import titanlite
from titanlite.config import JobConfig, parse_args, resolve_job
from titanlite.errors import ConfigError
from titanlite.tools.verify.verify import Verifier

HALF = {"training.local_batch_size": 8, "validation.local_batch_size": 8}
PLANS = {
    "DDP 2": {"parallelism.data_parallel_replicate_degree": 2, **HALF},
    "FSDP 2": {"parallelism.data_parallel_shard_degree": 2, **HALF},
    "TP 2": {"parallelism.tensor_parallel_degree": 2},
}
DDP = PLANS["DDP 2"]
# The batch lies over dp_replicate and dp_shard, not over the world.
MORE = {
    "HSDP 2 x 2": {
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 2,
        "training.local_batch_size": 4,
        "validation.local_batch_size": 4,
    },
    "FSDP 2 x TP 2": {**PLANS["FSDP 2"], **PLANS["TP 2"]},
}


MIXED = """
import torch
from torch import nn

import titanlite
from clip import PLAN, Clip, Sizes
from titanlite.training.loss import contrastive


def mean(outputs, batch):
    image, text, scale = outputs
    return (image[:, 0] * text[:, 1]).mean() * scale


class Normed(Clip):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.norm = nn.BatchNorm1d(sizes.dim)

    def forward(self, image, text):
        image, text, scale = super().forward(image, text)
        return self.norm(image), text, scale


titanlite.register_loss("alone", contrastive)
titanlite.register_loss("mean", mean)
titanlite.register_loss("each", "mixed:each")
titanlite.register_model("normed", Normed, Sizes, plan=PLAN)


def each(outputs, batch):
    image, text, scale = outputs
    return -(image * text).sum() * scale
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the example, with wrong losses and batch statistics besides, to be imported."""
    folder = tmp_path_factory.mktemp("clip")
    write_example("clip", "losses.md", folder)
    (folder / "mixed.py").write_text(MIXED)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def clip(folder: Path) -> Iterator[Path]:
    """That folder, from which nothing is imported yet: what a test registers ends with it."""
    yield folder
    for name in ("clip", "mixed"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def own_verifier(folder: Path) -> Iterator[Verifier]:
    """Ranks of their own: a pool that runs already would not see the folder."""
    with Verifier(timeout_seconds=120) as verifier:
        yield verifier


def job(folder: Path, changes: dict[str, object]) -> JobConfig:
    options = [f"--{key}={value}" for key, value in changes.items()]
    return parse_args(
        [
            f"--job.config_file={folder / 'clip.toml'}",
            "--experimental.custom_import=mixed",
            *options,
        ]
    )


@pytest.mark.parametrize(
    "plan", [*PLANS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_every_plan_has_the_loss_and_gradients_of_one_process(clip, own_verifier, plan) -> None:
    found = own_verifier.verify(job(clip, {**PLANS, **MORE}[plan]), steps=2)
    assert found.agrees, found.findings


def test_a_model_of_several_outputs_is_planned(clip) -> None:
    assert titanlite.plan(job(clip, PLANS["TP 2"]), hardware="cpu").step_seconds > 0


def test_a_batch_in_parts_is_refused_before_ranks_start(clip) -> None:
    lines = {
        "training.local_batch_size": 'training.global_batch_size: the loss "contrastive" is over '
        "the whole batch, so it cannot be accumulated in 2 parts; set training.local_batch_size to "
        "16, or training.global_batch_size to 8",
        "validation.local_batch_size": 'validation.local_batch_size: the loss "contrastive" is '
        "over the whole batch, so a validation needs batches of the same 16 samples; give 16",
    }
    for key, line in lines.items():
        with pytest.raises(ConfigError) as caught:
            resolve_job(job(clip, {key: 8}), 1)
        assert caught.value.problems == (line,)
    pipeline = {"degree": 2, "microbatch_size": 4, "schedule": "GPipe"}
    changes = {f"parallelism.pipeline_parallel_{key}": pipeline[key] for key in pipeline}
    with pytest.raises(ConfigError) as caught:
        resolve_job(job(clip, changes), 2)
    assert (
        'parallelism.pipeline_parallel_microbatch_size: the loss "contrastive" is over the whole '
        "batch, so a pipeline cannot cut it into 4 microbatches; set "
        "parallelism.pipeline_parallel_degree to 1"
    ) in caught.value.problems


def test_a_loss_that_mixes_samples_is_the_cause(clip, own_verifier) -> None:
    found = own_verifier.verify(job(clip, {**DDP, "training.loss": "alone"}), steps=1)
    assert not found.agrees
    assert found.cause.startswith("the loss of one sample depends on other samples: ")
    assert 'register the loss with over="batch"' in found.cause
    found = own_verifier.verify(job(clip, {**DDP, "training.loss": "mean"}), steps=1)
    assert found.cause.startswith("the loss is a mean over the samples that it is given")


@pytest.mark.parametrize(("plan", "mode"), [("DDP 2", "none"), ("FSDP 2", "full")])
def test_batch_statistics_are_named(clip, own_verifier, plan, mode) -> None:
    changes = {"model.name": "normed", "training.loss": "each", "activation_checkpoint.mode": mode}
    with pytest.raises(
        ConfigError, match=r"^model.name: the output of norm \(BatchNorm1d\) .*batch statistics"
    ):
        own_verifier.verify(job(clip, {**PLANS[plan], **changes}), steps=1)
