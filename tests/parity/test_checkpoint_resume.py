"""A run that goes on from a checkpoint is the run that was never stopped, to the bit."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch.distributed as dist
from plans import PLANS, by_num_ranks, checksums, config_of, make_job
from training import difference

from titanlite.checkpoint.run import Checkpoints
from titanlite.config import JobConfig, override
from titanlite.ranks.launch import Place, spawn

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
        results = spawn(go_on, num_ranks, [*straight, *again])
        for rank, of_rank in enumerate(results):
            for index, plan in enumerate(names):
                expected, found = of_rank[index][0], of_rank[len(names) + index][0]
                assert found == expected, f"{plan}, rank {rank}"


def test_resumed_and_never_stopped_are_equal_to_the_bit(tmp_path):
    check_resumes(["ddp4", "fsdp4"], tmp_path)


def note_saved(place: Place, config: JobConfig) -> list[tuple[int, list[str]]]:
    """The steps at which this rank hears of saved checkpoints; rank 1 is slow to save the first."""
    from titanlite.ranks.world import open_world

    heard = []
    with open_world(place) as world:
        job = make_job(config, world)
        with Checkpoints(job) as checkpoints:
            for step in range(1, 8):
                checkpoints.after_step(step, is_last=step == 7)
                if saved := checkpoints.pop_saved():
                    # As a callback may: ranks that come here at different steps would hang.
                    dist.barrier()
                    heard.append((step, [path.name for path in saved]))
                if step == 1:
                    first = checkpoints._saving
                    assert first is not None
                    first.result()
                    if world.rank == 1:
                        checkpoints._saving = Future()
                if step == 3 and world.rank == 1:
                    checkpoints._saving.set_result(None)
                if step == 5:
                    # The save of step 5 may end at any time, and is waited for before the last.
                    checkpoints._saving.result()
    return heard


def test_all_ranks_hear_of_a_checkpoint_at_the_same_step(tmp_path):
    keys = {"async_mode": "async", "enable_first_step_checkpoint": True, "interval": 5}
    job = config_of("single", tmp_path, **keys)
    job = override(job, {"parallelism.data_parallel_shard_degree": 2})
    expected = [(4, ["step-1"]), (6, ["step-5"]), (7, ["step-7"])]
    assert spawn(note_saved, 2, job, timeout_seconds=60) == [expected, expected]


@pytest.mark.slow
def test_every_plan_resumes_to_the_bit(tmp_path):
    check_resumes(list(PLANS), tmp_path)


@pytest.mark.slow
def test_resumed_under_another_plan_agrees_to_rounding(tmp_path):
    source = tmp_path / "tp2_fsdp2"
    ((_, straight),) = spawn(go_on, 4, [config("tp2_fsdp2", source)])[0]
    moved = config(
        "fsdp4",
        tmp_path / "fsdp4",
        initial_load_path=str(source / "checkpoint" / f"step-{SAVED_AT}"),
        initial_load_model_only=False,
    )
    ((_, resumed),) = spawn(go_on, 4, [moved])[0]
    for name, weight in straight.items():
        assert difference(resumed[name], weight) < 1e-11, name
