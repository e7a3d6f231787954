"""One fault of each class that `titanlite verify` names, in a user's small model, on threads."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from faulty_model.plan import Rows
from training import Sections, merged

from titanlite.config import JobConfig
from titanlite.modules.experts import Balancer
from titanlite.parallelize.float8.linear import Scaling
from titanlite.tools.verify.verify import Verifier
from titanlite.training import initial_weights
from titanlite.training.step import Trainer

JOB: Sections = {
    "model": {"name": "faulty", "flavor": "small"},
    "experimental": {"custom_import": "faulty_model"},
    "training": {"dataset": "synthetic", "local_batch_size": 2, "global_batch_size": 2},
    "activation_checkpoint": {"mode": "none"},
    "lr_scheduler": {"warmup_steps": 1},
}
TP = {"tensor_parallel_degree": 2}
FSDP = {"data_parallel_shard_degree": 2}
VALIDATES = {"validation": {"enable": True, "local_batch_size": 2}}


@pytest.fixture(scope="module")
def on_threads():
    with Verifier(threads=True) as verifier:
        yield verifier


def slow(*values):
    """A case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def config_of(plan: dict[str, Any], fault: str, *more: Sections):
    own = {"data_parallel_shard_degree": 1, **plan}
    return JobConfig.from_dict(merged(JOB, {"model": {"fault": fault}, "parallelism": own}, *more))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("", None),
        ("reduced by the block", None),
        ("bias on each rank", "down is the first .* The output contains the bias 2 times"),
        slow(
            "reduced by the block with its bias",
            "down is .*, and the sum contains the bias 2 times",
        ),
        # The Partial that the block reduces is no error, and not the cause of one.
        slow(
            "reduced by the block, no sum backward",
            r"every module output agrees, but .* the output of layers.1.norm is the first .* "
            r"The gradient of the input of layers.1.up .* is correct after a sum over tp",
        ),
        slow("not reduced in evaluation", "In its first batch, layers.0.down is .* Summed over tp"),
        slow(
            "later calls", r"step 2 has another loss when the same steps are run again \(.* instead"
        ),
    ],
)
def test_faults_of_a_plan(on_threads, fault, cause):
    more = [VALIDATES] if "evaluation" in fault else []
    Rows.calls = 0
    found = on_threads.verify(config_of(TP, fault, *more), steps=2 if "later" in fault else 1)
    assert found.agrees == (cause is None), found.findings
    if cause is not None:
        assert re.search(cause, found.cause), found.findings


def after_build(change) -> AbstractContextManager[Any]:
    build = Trainer.__post_init__

    def changed(self) -> None:
        build(self)
        change(self)

    return patch.object(Trainer, "__post_init__", changed)


def stay_gathered():
    def change(trainer):
        for module in trainer.parts[0].modules():
            if hasattr(module, "set_reshard_after_backward"):
                module.set_reshard_after_backward(False)

    return after_build(change)


def last_block_first():
    def change(trainer):
        blocks = trainer.parts[0].layers._modules
        for key in list(blocks)[::-1]:
            blocks[key] = blocks.pop(key)

    return after_build(change)


def one_block_skipped():
    def change(trainer):
        block = trainer.parts[0].layers["1"]
        block.scale.forward = lambda x: x
        block.forward = lambda x, positions: x + block.scale(x)

    return after_build(change)


def each_others_seed():
    generator_for = initial_weights.generator_for
    names = {"layers.0.up.weight": "layers.0.gate.weight"}
    names |= {other: name for name, other in names.items()}
    return patch.object(
        initial_weights,
        "generator_for",
        lambda seed, name: generator_for(seed, names.get(name, name)),
    )


@pytest.mark.parametrize(
    ("bug", "cause"),
    [
        slow(stay_gathered, "after step 1 the modules hold other tensors .* stale weights"),
        slow(
            last_block_first,
            "between the output of tok_emb and the input x of layers.0: .* correct the order",
        ),
        slow(
            one_block_skipped,
            "layers.1.norm, .* never run, and the input of layers.1.scale, which comes",
        ),
        (
            each_others_seed,
            "layers.0.(up|gate).weight and layers.0.(gate|up).weight are exchanged: each has",
        ),
    ],
)
def test_faults_of_a_run(on_threads, bug, cause):
    found = on_threads.verify(
        config_of(FSDP, "", {"training": {"local_batch_size": 1}}), steps=1, patch=bug
    )
    assert re.search(cause, found.cause), found.findings


@pytest.mark.slow
def test_a_wrong_scale_of_a_float8_weight(on_threads):
    job = {
        "model": {"name": "image_transformer", "flavor": "debug"},
        "training": {"dataset": "synthetic", "local_batch_size": 2, "global_batch_size": 2},
        "parallelism": {"data_parallel_shard_degree": 1, **TP},
    }
    float8 = {
        "model": {"converters": ["quantize.linear.float8"]},
        "quantize": {"linear": {"float8": {"recipe_name": "tensorwise", "emulate": True}}},
    }
    own = patch.object(Scaling, "over_weight", lambda scaling: ())
    found = on_threads.verify(JobConfig.from_dict(merged(job, float8)), steps=1, patch=lambda: own)
    assert "first float8 layer whose scales of its weight differ" in found.cause


def test_an_error_that_plan_and_reference_share(on_threads, monkeypatch):
    job = {
        "model": {"name": "llama3", "flavor": "moe_debug"},
        "training": {
            "dataset": "synthetic",
            "seq_len": 16,
            "local_batch_size": 1,
            "global_batch_size": 2,
        },
        "parallelism": FSDP,
    }
    update = Balancer.update

    def reversed_update(self):
        for layer in self.layers.values():
            layer.bias_step *= -1
        update(self)
        for layer in self.layers.values():
            layer.bias_step *= -1

    monkeypatch.setattr(Balancer, "update", reversed_update)
    found = on_threads.verify(JobConfig.from_dict(job), steps=1)
    assert "the balancing bias of layers.1.moe does not follow from its" in found.cause
