"""A run that goes on from a checkpoint is the run that was never stopped, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import PLANS, by_num_ranks, checksums, config_of, make_job
from training import difference

from titanlite.checkpoint.run import Checkpoints
from titanlite.config import JobConfig, override
from titanlite.ranks.launch import Place, run_ranks

SAVED_AT, STEPS = 3, 6


def go_on(place: Place, configs: list[JobConfig]) -> list[tuple[dict, dict]]:
    """Run each job to the end, from its newest checkpoint; its state as checksums, its weights."""
    from titanlite.ranks.world import open_world

    results = []
    with open_world(place) as world:
        for config in configs:
            job = make_job(config, world)
            with Checkpoints(job) as checkpoints:
                for step in range(checkpoints.first_step, STEPS + 1):
                    job.step()
                    # What it leaves gathered must not be what is saved.
                    job.evaluate()
                    checkpoints.after_step(step)
            weights = {name: whole.clone() for name, whole in job.whole_parameters()}
            results.append((checksums(job), weights))
    return results


def config(plan: str, folder: Path, **checkpoint: object) -> JobConfig:
    job = config_of(plan, folder, interval=SAVED_AT, **checkpoint)
    return override(job, {"validation.enable": True, "validation.steps": 1})


def check_resumes(plans: list[str], folder: Path) -> None:
    """Each plan: straight on, saving in the background; and again from what was saved."""
    for num_ranks, names in by_num_ranks(dict.fromkeys(plans)).items():
        straight = [config(plan, folder / plan, async_mode="async") for plan in names]
        again = [config(plan, folder / plan, load_step=SAVED_AT) for plan in names]
        # Not only on the first rank: each has its own part of the weights.
        results = run_ranks(go_on, num_ranks, [*straight, *again])
        for rank, of_rank in enumerate(results):
            for index, plan in enumerate(names):
                expected, found = of_rank[index][0], of_rank[len(names) + index][0]
                assert found == expected, f"{plan}, rank {rank}"


def test_resumed_and_never_stopped_are_equal_to_the_bit(tmp_path):
    check_resumes(["ddp4", "fsdp4"], tmp_path)


@pytest.mark.slow
def test_every_plan_resumes_to_the_bit(tmp_path):
    check_resumes(list(PLANS), tmp_path)


@pytest.mark.slow
def test_resumed_under_another_plan_agrees_to_rounding(tmp_path):
    source = tmp_path / "tp2_fsdp2"
    ((_, straight),) = run_ranks(go_on, 4, [config("tp2_fsdp2", source)])[0]
    moved = config(
        "fsdp4",
        tmp_path / "fsdp4",
        initial_load_path=str(source / "checkpoint" / f"step-{SAVED_AT}"),
        initial_load_model_only=False,
    )
    ((_, resumed),) = run_ranks(go_on, 4, [moved])[0]
    for name, weight in straight.items():
        assert difference(resumed[name], weight) < 1e-11, name
