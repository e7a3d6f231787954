"""Frozen weights: no gradient, no optimizer state, unchanged to the bit, under every plan."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from training import DEBUG_JOB, merged

from titanlite.config import JobConfig, resolve_job
from titanlite.errors import ConfigError
from titanlite.modules.shards import local_part
from titanlite.ranks.hang_state import recorded_calls
from titanlite.ranks.world import World
from titanlite.tools.verify.pool import RankPool
from titanlite.tools.verify.verify import Verifier

LORA: dict[str, Any] = {
    "experimental": {"custom_import": "lora_model"},
    "training": {"dataset": "digits", "steps": 3},
    "optimizer": {"lr": 0.01},
}
PLANS = {
    "FSDP": {"data_parallel_shard_degree": 2},
    "DDP": {"data_parallel_replicate_degree": 2},
    "TP": {"tensor_parallel_degree": 2},
    "PP": {"pipeline_parallel_degree": 2},
}


def lora(plan: dict[str, Any], **sizes: Any) -> JobConfig:
    sections = {"model": {"name": "lora", "first_adapter": 2, **sizes}, "parallelism": plan}
    rest = {name: keys for name, keys in DEBUG_JOB.items() if name != "model"}
    return JobConfig.from_dict(merged(rest, LORA, sections))


def train_and_look(world: World, config: JobConfig) -> dict[str, Any]:
    from titanlite.job import build_job

    job = build_job(resolve_job(config, world.size), world)
    start = {name: whole.clone() for name, whole in job.whole_parameters()}
    before = recorded_calls()
    losses = [job.step().loss for _ in range(3)]
    reduced = [
        call.num_elements
        for call in recorded_calls()[len(before) :]
        if "reduce" in call.operation and call.num_elements > 16
    ]
    end = {name: whole.clone() for name, whole in job.whole_parameters()}
    frozen = [name for name, p in job.parameters.items() if not p.requires_grad]
    assert all(job.parameters[name].grad is None for name in frozen)
    states = job.trainer.optimizer.state
    assert not any(job.parameters[name] in states for name in frozen)
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    rows = [(row.requested, row.note) for row in job.applied if row.feature == "frozen tensors"]
    return {"losses": losses, "changed": changed, "end": end, "reduced": sum(reduced), "rows": rows}


def test_only_adapters_change_and_every_plan_agrees() -> None:
    """The first two blocks, and so the first stage, have nothing to train."""
    with RankPool(1, timeout_seconds=120) as pool:
        (reference,) = pool.call(train_and_look, lora({}))
        with pytest.raises(ConfigError, match="lora has no parameter to train"):
            pool.call(train_and_look, lora({}, first_adapter=4))
    assert reference["changed"] == {f"blocks.{i}.{n}.weight" for i in (2, 3) for n in "ab"}
    sizes = [whole.numel() for whole in reference["end"].values()]
    trained = sum(reference["end"][name].numel() for name in reference["changed"])
    told = f"{trained:,} of {sum(sizes):,} parameters are trained"
    assert reference["rows"] == [(f"{len(sizes) - 4} of {len(sizes)}", told)]
    # Each adapter has 2 x 16 and 32 x 2 parameters; FSDP2 reduces in each of two microbatches.
    reduced = {"FSDP": 3 * 2 * 2 * 96, "DDP": 3 * 2 * 96, "TP": None, "PP": 0}
    with RankPool(2, timeout_seconds=120) as pool:
        for name, plan in PLANS.items():
            for found in pool.call(train_and_look, lora(plan)):
                assert found["losses"] == pytest.approx(reference["losses"], rel=1e-12), name
                assert found["changed"] == reference["changed"], name
                assert reduced[name] in (None, found["reduced"]), name
                for key, whole in reference["end"].items():
                    assert torch.allclose(found["end"][key], whole, rtol=0, atol=1e-13), (name, key)


def thaw() -> AbstractContextManager[Any]:
    """Every step changes one frozen weight by the smallest amount."""
    from titanlite.training.step import Trainer

    update = Trainer._update

    def changed(self: Trainer, norm: torch.Tensor) -> float:
        done = update(self, norm)
        with torch.no_grad():
            weight = local_part(next(p for p in self.parts[0].parameters() if not p.requires_grad))
            weight.flatten()[0] *= 1 + 1e-15
        return done

    return patch.object(Trainer, "_update", changed)


def test_verify_knows_frozen_weights(verifier: Verifier) -> None:
    config = lora(PLANS["FSDP"])
    found = verifier.verify(config, steps=2, reloads=True)
    assert found.agrees, found.findings
    found = verifier.verify(config, steps=1, patch=thaw)
    assert any("step 1 changes the frozen weight embed.weight" in str(f) for f in found.findings)
