"""The effective plan's rows about the run: device, batch, warm-up and decay."""

from __future__ import annotations

from typing import Any

import pytest

from titanlite.config import load_config, make_config, make_parallel_dims
from titanlite.observe.run_rows import run_rows
from titanlite.plan_row import PlanRow


def rows(*argv: str, device_type: str = "cpu", num_gpus: int = 0) -> dict[str, PlanRow]:
    config = load_config(argv)
    dims = make_parallel_dims(config, None)
    made = run_rows(config, dims, device_type, num_local_ranks=dims.world_size, num_gpus=num_gpus)
    return {row.feature: row for row in made}


@pytest.mark.parametrize(
    ("asked", "active", "num_gpus", "row"),
    [
        ("cpu", "cpu", 4, ("cpu", "cpu", "")),
        ("cuda", "cuda", 4, ("cuda", "cuda", "")),
        ("auto", "cpu", 0, ("cpu", "cpu", "auto: this machine has no GPU")),
        ("auto", "cuda", 4, ("cuda", "cuda", "auto: every rank has a GPU")),
        ("auto", "cpu", 1, ("cuda", "cpu", "auto: 4 ranks need more than 1 GPU")),
    ],
)
def test_a_device_that_auto_does_not_use_is_said(
    asked: str, active: str, num_gpus: int, row: tuple[str, str, str]
) -> None:
    found = rows(
        f"--job.device={asked}",
        "--parallelism.data_parallel_shard_degree=4",
        device_type=active,
        num_gpus=num_gpus,
    )
    assert found["device"] == PlanRow("device", *row)


def test_a_batch_that_depends_on_the_plan_says_so() -> None:
    plan = ("--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=4")
    assert rows(*plan)["global batch"] == PlanRow(
        "global batch",
        "-1",
        "8",
        "4 sequences on each of 2 data-parallel ranks; it depends on the plan: "
        "give training.global_batch_size to fix it",
    )
    fixed = rows(*plan, "--training.global_batch_size=24")["global batch"]
    assert not fixed.differs
    assert fixed.note == "4 sequences on each of 2 data-parallel ranks, 3 times a step"


@pytest.mark.parametrize(
    ("keys", "steps", "row"),
    [
        ({"warmup_steps": 5}, 20, ("5 + 15 steps", "5 + 15 steps", "of 20 steps; linear decay")),
        # The default gives way: nobody asked for it.
        ({}, 20, ("20 + 0 steps", "20 + 0 steps", "of 20 steps; linear decay")),
        (
            {"warmup_steps": 30},
            3,
            ("30 + 0 steps", "3 + 0 steps", "warm-up cut to the 3 steps of the run"),
        ),
        (
            {"warmup_steps": 20, "decay_ratio": 0.9},
            100,
            ("20 + 90 steps", "20 + 80 steps", "decay cut to the 100 steps of the run"),
        ),
        (
            {"warmup_steps": 30, "decay_ratio": 0.9, "total_steps": 10},
            5,
            (
                "30 + 9 steps",
                "10 + 0 steps",
                "warm-up and decay cut to the 10 steps of the schedule",
            ),
        ),
    ],
)
def test_a_warm_up_or_decay_that_is_cut_says_so(
    keys: dict[str, Any], steps: int, row: tuple[str, str, str]
) -> None:
    config = make_config({"training": {"steps": steps}, "lr_scheduler": keys})
    dims = make_parallel_dims(config, None)
    found = run_rows(config, dims, "cpu", num_local_ranks=1, num_gpus=0)
    assert found[-1] == PlanRow("warm-up + decay", *row)
