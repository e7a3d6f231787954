"""The first screen of a run: its facts, its plan, and how it fits 80 columns."""

import re
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import JobConfig, parse_args, resolve_job
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.observe.first_screen import Fact, beside, in_brief, render_screen
from titanlite.observe.run_facts import device_fact, run_facts
from titanlite.plan_row import PlanRow
from titanlite.tools.figures.mesh_drawing import draw_mesh

CPU = ("cpu", "gloo", 4, 0)
DIGITS = ("2.13.0", 1498, 299)
# For the configuration that reads a folder of its own.
HERE = {"cifar10": ("--training.dataset_path=configs",)}


def facts_of(config: Any, machine: tuple[Any, ...] = CPU, **start: Any) -> dict[str, Fact]:
    resolved = resolve_job(config)
    made = run_facts(
        resolved,
        device_fact(resolved, *machine),
        *DIGITS,
        num_parameters=449_984,
        folder=Path("outputs/run"),
        **start,
    )
    return {fact.name: fact for fact in made}


def facts(*argv: str, machine: tuple[Any, ...] = CPU) -> dict[str, Fact]:
    return facts_of(parse_args(argv), machine)


def test_the_shipped_job_says_what_it_is_going_to_do() -> None:
    shown = facts_of(parse_args(["--job.config_file=configs/tp2_fsdp2.toml"]))
    assert {name: fact.text for name, fact in shown.items()} == {
        "device": "cpu, 4 ranks with gloo; this machine has no GPU",
        "torch": "2.13.0",
        "model": "image_transformer, flavor digits: 449,984 parameters",
        "sequence": "64 tokens of a vocabulary of 17",
        "data": "digits: 1,498 sequences, 299 for validation every 100 steps",
        "dtype": "float32 for parameters, compute, reductions",
        "batch": "global 64 = 2 data ranks x 32 x 1 accumulation",
        "steps": "1 to 400 of 4,096 tokens, 17.1 epochs",
        "optimizer": "AdamW, weight decay 0.1, gradients clipped to norm 1",
        "learning rate": "peak 0.003: 30 steps of warm-up, 370 of cosine decay to 0",
        "output": "outputs/run",
        "starts from": "random weights of seed 0",
        "checkpoints": "none are saved",
    }
    assert not any(fact.differs for fact in shown.values())


@pytest.mark.parametrize(
    ("asked", "active", "num_gpus", "text", "differs"),
    [
        ("cpu", "cpu", 4, "cpu, 4 ranks with gloo", False),
        ("cuda", "cuda", 4, "cuda, 4 ranks with nccl, H100", False),
        ("auto", "cuda", 4, "cuda, 4 ranks with nccl, H100", False),
        ("auto", "cpu", 0, "cpu, 4 ranks with gloo; this machine has no GPU", False),
        ("auto", "cpu", 1, "cpu, 4 ranks with gloo; not cuda: 4 ranks need more than 1 GPU", True),
    ],
)
def test_a_device_that_auto_does_not_use_is_said(
    asked: str, active: str, num_gpus: int, text: str, differs: bool
) -> None:
    backend, name = ("nccl", "H100") if active == "cuda" else ("gloo", "")
    machine = (active, backend, 4, num_gpus, name)
    plan = (f"--job.device={asked}", "--parallelism.data_parallel_shard_degree=4")
    assert facts(*plan, machine=machine)["device"] == Fact("device", text, differs)


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ("--checkpoint.last_save_in_hf", "last_save_in_hf"),
        ("--checkpoint.load_only --checkpoint.interval=5", "interval, load_only"),
        ("--checkpoint.enable --checkpoint.load_only --checkpoint.interval=5", "interval"),
        ("--checkpoint.interval=500", ""),
    ],
)
def test_keys_of_checkpoints_that_do_nothing_are_named(given: str, ignored: str) -> None:
    shown = facts(*given.split())["checkpoints"]
    assert shown.differs is bool(ignored)
    assert shown.text.partition(", so these keys have no effect: ")[2] == ignored


def test_a_batch_that_depends_on_the_plan_says_so() -> None:
    plan = ("--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=4")
    assert facts(*plan)["batch"] == Fact(
        "batch",
        "global 8 = 2 data ranks x 4 x 1 accumulation; it depends on the plan: "
        "give training.global_batch_size to fix it",
        differs=True,
    )
    fixed = facts(*plan, "--training.global_batch_size=24")["batch"]
    assert fixed == Fact("batch", "global 24 = 2 data ranks x 4 x 3 accumulation")


@pytest.mark.parametrize(
    ("keys", "steps", "text", "differs"),
    [
        ({"warmup_steps": 5}, 20, "5 steps of warm-up, 15 of linear decay to 0", False),
        # The default gives way: nobody asked for it.
        ({}, 20, "20 steps of warm-up", False),
        (
            {"warmup_steps": 10, "decay_ratio": 0.25, "min_lr_factor": 0.1, "decay_type": "sqrt"},
            100,
            "10 steps of warm-up, 65 at the peak, 25 of sqrt decay to 0.0001",
            False,
        ),
        (
            {"warmup_steps": 30},
            3,
            "3 steps of warm-up; warm-up cut from 30 to fit the 3 steps of the run",
            True,
        ),
        (
            {"warmup_steps": 20, "decay_ratio": 0.9},
            100,
            "20 steps of warm-up, 80 of linear decay to 0; decay cut from 90 to fit the 100 steps "
            "of the run",
            True,
        ),
        (
            {"warmup_steps": 30, "decay_ratio": 0.9, "total_steps": 10},
            5,
            "10 steps of warm-up, a schedule of 10 steps; warm-up cut from 30 and decay cut from 9 "
            "to fit the 10 steps of the schedule",
            True,
        ),
    ],
)
def test_warm_up_and_decay_are_shown_as_they_will_be(
    keys: dict[str, Any], steps: int, text: str, differs: bool
) -> None:
    config = JobConfig.from_dict(
        {"training": {"steps": steps}, "lr_scheduler": keys, "optimizer": {"lr": 1e-3}}
    )
    shown = facts_of(config)["learning rate"]
    assert shown == Fact("learning rate", f"peak 0.001: {text}", differs)


def test_mixed_precision_endless_data_and_a_checkpoint_are_named() -> None:
    config = JobConfig.from_dict(
        {
            "training": {"mixed_precision_param": "bfloat16", "dataset": "synthetic", "steps": 40},
            "checkpoint": {"enable": True, "interval": 20, "async_mode": "async"},
        }
    )
    source = Path("outputs/run/checkpoint/step-20")
    shown = facts_of(config, first_step=21, starts_from=source)
    assert shown["dtype"].text == "parameters float32, compute bfloat16, reductions float32"
    assert shown["starts from"].text == str(source)
    assert shown["steps"].text.startswith("21 to 40 of 512 tokens, ")
    assert shown["checkpoints"].text == (
        "every 20 steps and at the end, in outputs/run/checkpoint, while training goes on"
    )
    any_device, x = Fact("device", ""), Path("x")
    endless = run_facts(
        resolve_job(config), any_device, "", None, num_parameters=1, folder=x, first_step=41
    )
    texts = {fact.name: fact.text for fact in endless}
    assert texts["data"] == "synthetic: endless"
    assert texts["steps"] == "none: 40 of 40 are done"


ROWS = [
    PlanRow("pipeline parallel", "off", "off"),
    PlanRow("tensor parallel", "TP 2", "TP 2", "30 modules, sequence parallel; loss parallel"),
    PlanRow("compile", "off", "off"),
    PlanRow("data parallel", "off", "FSDP 4", "the 4 ranks share one set of weights"),
]


def test_the_plain_screen_is_aligned_and_wraps_below_itself() -> None:
    screen = render_screen(
        "a job", [Fact("device", "cpu"), Fact("batch", "8", True)], ROWS, "mesh: 1 rank"
    )
    assert screen == (
        "a job\n"
        "\n"
        "  device  cpu\n"
        "! batch   8\n"
        "\n"
        "  feature          requested  active  note\n"
        "  tensor parallel  TP 2       TP 2    30 modules, sequence parallel; loss\n"
        "                                      parallel\n"
        "! data parallel    off        FSDP 4  the 4 ranks share one set of weights\n"
        "  off              pipeline parallel, compile\n"
        "\n"
        "mesh: 1 rank"
    )


@pytest.mark.parametrize("config", sorted(Path("configs").glob("*.toml")), ids=lambda p: p.stem)
def test_the_screen_of_every_config_fits_80_columns_and_some_40_lines(config: Path) -> None:
    resolved = resolve_job(parse_args([f"--job.config_file={config}", *HERE.get(config.stem, ())]))
    long = "6 units; reshard after forward: default; computes in bfloat16, reduces in float32"
    features = ("pipeline parallel", "tensor parallel", "context parallel", "data parallel")
    rows = [PlanRow(feature, "HSDP 2 x 2", "HSDP 2 x 2", long) for feature in features]
    content = (
        resolved.config.job.description,
        list(facts_of(resolved.config).values()),
        [*rows, PlanRow("activation checkpoint", "off", "off"), PlanRow("compile", "off", "off")],
        draw_mesh(resolved.dims),
    )
    screen = render_screen(*content)
    lines = screen.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 42
    assert len(render_screen(*in_brief(*content)).splitlines()) <= 15
    assert screen.isascii()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", screen)


def test_the_groups_of_a_rank_stand_beside_the_grid_where_there_is_room() -> None:
    drawing = draw_mesh(ParallelDims(dp_shard=2, tp=2))
    assert beside(drawing, 80) == [
        "mesh: dp_shard 2 x tp 2 = 4 ranks",
        "        tp   0   1      rank 0 is grouped",
        "           +---+---+      over dp_shard with 0, 2",
        "dp_shard 0 | 0 | 1 |      over tp       with 0, 1",
        "dp_shard 1 | 2 | 3 |",
        "           +---+---+",
    ]
    assert beside(drawing, 40)[-3:] == [
        "rank 0 is grouped",
        "  over dp_shard with 0, 2",
        "  over tp       with 0, 1",
    ]
    assert beside(draw_mesh(ParallelDims()), 80) == ["mesh: 1 rank, nothing is split"]


def test_a_long_description_is_wrapped_too() -> None:
    screen = render_screen(30 * "word ", [Fact("device", "cpu")], ROWS, "mesh: 1 rank")
    assert [len(line) for line in screen.splitlines()[:3]] == [79, 69, 0]
