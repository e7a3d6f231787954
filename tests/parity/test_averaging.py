"""The average of the weights: equal under every plan, validated, saved, moved and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from training import PP, SHARD, TP, Sections, debug_config, on_ranks

import titanlite
from titanlite.errors import ConfigError
from titanlite.job import build_job
from titanlite.ranks.world import World
from titanlite.tools.convert.command import read_tensors
from titanlite.tools.verify.verify import Verifier

EMA: Sections = {
    "weight_averaging": {"method": "ema", "decay": 0.6, "start_step": 2},
    "training": {"steps": 4},
}
LAST: Sections = {
    "weight_averaging": {"method": "last_k", "k": 2, "freq": 2},
    "training": {"steps": 4},
}


def trained(world: World, config: titanlite.JobConfig) -> tuple[list[dict[str, Any]], Any, Any]:
    """The weights after each step; then the averages, and the weights after them."""
    job = build_job(resolved(config, world), world)
    kept = []
    for _ in range(config.training.steps):
        job.step()
        kept.append(dict(job.whole_parameters()))
    with job.trainer.averaged():
        averages = dict(job.whole_parameters())
    return kept, averages, dict(job.whole_parameters())


def resolved(config: titanlite.JobConfig, world: World) -> Any:
    from titanlite.config import resolve_job

    return resolve_job(config, world.size)


@pytest.mark.parametrize("job", [EMA, LAST], ids=["ema", "last_k"])
def test_an_average_is_that_of_the_weights(job: Sections) -> None:
    config = debug_config(job, {"parallelism": {**TP, **SHARD}})
    kept, averages, after = on_ranks(trained, 4, config)[0]
    for name, average in averages.items():
        _, second, third, fourth = (weights[name] for weights in kept)
        expected = 0.36 * second + 0.24 * third + 0.4 * fourth
        if job is LAST:
            expected = (kept[0][name] + third) / 2
        torch.testing.assert_close(average, expected, rtol=1e-12, atol=1e-15)
        assert not torch.equal(average, fourth)
        assert torch.equal(after[name], fourth)


@pytest.mark.parametrize(
    "plan",
    [
        {**PP, **SHARD},
        pytest.param({**TP, "context_parallel_degree": 2}, marks=pytest.mark.slow, id="TP, CP"),
    ],
    ids=str,
)
def test_verify_knows_averages(verifier: Verifier, plan: dict[str, int]) -> None:
    validates: Sections = {"validation": {"enable": True, "local_batch_size": 2}}
    config = debug_config(EMA, validates, {"parallelism": plan})
    found = verifier.verify(config, steps=3, reloads=True)
    assert found.agrees, found.findings


def run(folder: Path, job: Sections, steps: int, plan: dict[str, int], **keys: Any) -> Any:
    config = debug_config(
        job,
        {
            "job": {"dump_folder": str(folder)},
            "lr_scheduler": {"total_steps": 4},
            "training": {"steps": steps},
            "parallelism": plan,
            "sampling": {"num_samples": 0},
            "validation": {"enable": True, "freq": 1, "steps": 4, "local_batch_size": 2},
            "checkpoint": {"enable": True, "last_save_model_only": False, **keys},
        },
    )
    return titanlite.train(config, threads=True).validation_losses


@pytest.mark.slow
@pytest.mark.parametrize("job", [EMA, LAST], ids=["ema", "last_k"])
def test_an_average_moves_to_another_plan_and_is_exported(tmp_path: Path, job: Sections) -> None:
    alone = run(tmp_path / "alone", job, 4, {})
    first = run(tmp_path / "moved", job, 3, {**TP, **SHARD})
    moved = {**first, **run(tmp_path / "moved", job, 4, {**PP, **SHARD})}
    assert moved == pytest.approx(alone, rel=1e-10)
    plain = run(tmp_path / "plain", {**job, "weight_averaging": {}}, 4, {})
    assert plain[4] != pytest.approx(alone[4], rel=1e-6)
    # The average leaves the training state by `convert`, and by a checkpoint of weights.
    out = tmp_path / "average.safetensors"
    assert (
        titanlite.cli.main(["convert", str(tmp_path / "moved/checkpoint"), "--out", str(out)]) == 0
    )
    run(tmp_path / "weights", job, 4, {**TP, **SHARD}, last_save_model_only=True)
    again = tmp_path / "weights.safetensors"
    source = str(tmp_path / "weights/checkpoint")
    assert titanlite.cli.main(["convert", source, "--out", str(again), "--dtype", "float64"]) == 0
    one, other = read_tensors(out), read_tensors(again)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-6, atol=1e-7)
    # A run that starts from these weights has the average.
    started = run(
        tmp_path / "started",
        {"training": {}},
        1,
        {},
        initial_load_path=str(tmp_path / "moved/checkpoint/step-4"),
    )
    assert started[1] == pytest.approx(alone[4], rel=0.05)


def test_an_average_begins_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    run(tmp_path, {"training": {}}, 2, {})
    with_average = run(tmp_path, EMA, 3, {})
    run(tmp_path, {"training": {}}, 4, {})
    assert list(with_average) == [3]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"decay": 0.9}, 'weight_averaging.decay: it is only for "ema", but'),
        ({"method": "ema", "k": 2}, 'weight_averaging.k: it is only for "last_k", but'),
        ({"method": "ema", "start_step": 99}, "start_step: 99 is after the last step, 4"),
        ({"start_step": 2}, 'start_step: weight_averaging.method is "none"'),
    ],
)
def test_keys_that_do_nothing_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        debug_config({"weight_averaging": keys, "training": {"steps": 4}})
