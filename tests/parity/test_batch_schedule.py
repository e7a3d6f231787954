"""A global batch whose size depends on the step: every plan trains as one process, resumed too."""

import json
from pathlib import Path

import pytest
from training import PP, REPLICATE, SHARD, TP, Sections, debug_config, differences, train

import titanlite
from titanlite.errors import ConfigError
from titanlite.tools.verify.verify import Verifier

SIZES = [4, 8, 4, 12, 12]
SCHEDULE = [[step, size] for step, size in enumerate(SIZES, 1)]
JOB: Sections = {
    "training": {
        "global_batch_size": 4,
        "batch_size_schedule": SCHEDULE,
        "steps": 5,
        "dataset": "digits",
    }
}


@pytest.mark.parametrize(
    "plans",
    [[REPLICATE, SHARD, PP], pytest.param([TP | SHARD, PP | REPLICATE], marks=pytest.mark.slow)],
)
def test_every_plan_agrees_across_each_change(plans: list[dict[str, int]]) -> None:
    config = debug_config(JOB)
    assert config.training.batch_size_schedule == ((1, 4), (2, 8), (3, 4), (4, 12))
    (reference,) = train([config])
    trained = train([debug_config(JOB, {"parallelism": plan}) for plan in plans])
    for plan, training in zip(plans, trained, strict=True):
        for what, difference in differences(training, reference).items():
            assert difference < 1e-11, f"{plan}: {what}: {difference:.1e}"


def test_a_run_resumed_under_another_plan_reads_the_batches_of_its_steps(tmp_path: Path) -> None:
    def run(folder: str, steps: int, plan: dict[str, int]) -> list[float]:
        keys: Sections = {
            "job": {"dump_folder": str(tmp_path / folder)},
            "training": {"steps": steps},
            "lr_scheduler": {"total_steps": 5},
            "checkpoint": {"enable": True, "last_save_model_only": False},
            "sampling": {"num_samples": 0},
            "parallelism": plan,
        }
        config = debug_config(JOB, keys)
        return titanlite.train(config, threads=True).losses

    straight = run("straight", 5, {})
    resumed = run("resumed", 3, REPLICATE) + run("resumed", 5, SHARD)
    assert resumed == pytest.approx(straight, rel=1e-11)
    records = map(json.loads, (tmp_path / "straight/metrics.jsonl").read_text().splitlines())
    read = [one["tokens_per_second"] * one["seconds"] / 64 for one in records]
    assert read == pytest.approx(SIZES, rel=1e-3)
    assert "global 4 = 1 data rank x 2 x 2 accumulation; 8 from step 2 on; 4 from step 3 on" in (
        " ".join((tmp_path / "straight/first_screen.txt").read_text().split())
    )


def test_verify_moves_later_changes_into_its_steps() -> None:
    keys: Sections = {
        "training": {"batch_size_schedule": [[100, 8], [200, 4]]},
        "parallelism": SHARD,
    }
    with Verifier(threads=True) as verifier:
        found = verifier.verify(debug_config(keys), steps=3, reloads=True)
    assert found.agrees, found.findings
    assert found.job.batch_sizes == ((1, 8), (2, 8), (3, 4))


def test_the_planner_plans_the_largest_batch() -> None:
    largest = {"batch_size_schedule": [], "global_batch_size": 12}
    plans = [
        titanlite.plan(debug_config(JOB, {"training": keys}), hardware="h100").plan
        for keys in ({}, largest)
    ]
    assert plans[0].prediction == plans[1].prediction
    assert "of the steps with the largest, 12 sequences" in " ".join(plans[0].notes)


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ([[3, 6]], "6 is not a multiple of 4 (local_batch_size 2 x data-parallel degree 2); give"),
        ([[3, 8], [2, 4]], "a list of [step, sequences] with ascending steps"),
        ([[1, 4]], "step 1 has 4 sequences, but global_batch_size is 8; give 4 for both"),
        ([[3]], "a list of [step, sequences] with ascending steps"),
    ],
)
def test_wrong_schedules_are_one_line(schedule: list[list[int]], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        debug_config({"training": {"batch_size_schedule": schedule}, "parallelism": SHARD})
    (problem,) = caught.value.problems
    assert problem.startswith("training.batch_size_schedule")
    assert line in problem
