"""`titanlite verify`: what it is asked for, sizes made small, and differences judged; no ranks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

from titanlite.cli import main
from titanlite.config import JobConfig, make_model_config, override, parse_args, resolve_job
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.start import check_start
from titanlite.tools.verify.command import parse
from titanlite.tools.verify.differences import (
    Tolerance,
    differences,
    failures,
    same_shards,
    unequal_replicas,
)
from titanlite.tools.verify.jobs import (
    accumulation_pair,
    plan_job,
    reference_job,
    scheduled_lr,
    steps_until_stable,
)
from titanlite.tools.verify.junit import Case, to_junit
from titanlite.tools.verify.matrix import read_results
from titanlite.tools.verify.record import Agreement, RankRun, RankStep, ReferenceStep
from titanlite.tools.verify.shrink import shrink
from titanlite.training.optimizer import lr_factor

CONFIGS = sorted((Path(__file__).parents[4] / "configs").glob("*.toml"))
TP2 = str(Path(__file__).parents[4] / "configs" / "tp2_fsdp2.toml")
SYNTHETIC = ["--training.dataset=synthetic", "--training.dataset_path=none"]


def load(path: Path):
    is_text = {"pydoc", "chat"} & set(path.read_text().split('"'))
    changes = [] if is_text else SYNTHETIC
    return parse_args([f"--job.config_file={path}", *changes])


def test_options_are_told_from_the_job():
    options = parse(
        [
            *("a.toml", "--steps", "3", "--dtype=float32", "--shrink", "--training.steps", "9"),
            "--x.y=1",
        ]
    )
    assert (options.steps, options.dtype, options.shrink) == (3, "float32", True)
    assert options.job == ["--job.config_file=a.toml", "--training.steps", "9", "--x.y=1"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps=0"], "--steps: 0 is less than 1"),
        (["--dtype=int8"], "--dtype: there is no 'int8'; choose from float64, float32, bfloat16"),
        (["a.toml", "--json"], "--json: needs a value; write --json=value"),
        (["none.toml"], 'job.config_file: "none.toml" does not exist; give a TOML file'),
        ([], "no file is given; run titanlite verify configs/tp2_fsdp2.toml"),
        (["--parallelism.tensor_parallel_degree=2"], "job.config_file: no file is given; run "),
        ([TP2, "--parallelism.tensor_parallel_degree=3"], "degree: 3 does not divide"),
        ([TP2, "--model.flavour=debug"], "did you mean model.flavor?"),
        (["a.toml", "--limit=3"], "--limit: works only with --matrix; remove it"),
        (["a.toml", "--compile"], "--compile: works only with --matrix; remove it, or give --com"),
        (["--matrix", "--shrink"], "--shrink: is for a single job, not for --matrix; remove it"),
        (
            ["--matrix", "--threads", "--job.device=cuda"],
            'job.device: "cuda" needs a GPU, and there',
        ),
        (["a.toml", "--json=/"], '--json: "/" is a folder; give a file'),
        (["a.toml", "--json=/dev/null/x"], '--json: "/dev/null/x" cannot be written; give another'),
        (["--matrix", "--output=/dev/null"], '--output: "/dev/null" cannot be used (File exists)'),
    ],
)
def test_bad_input_is_one_line_and_2(words, line, capsys):
    assert main(["verify", *words]) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shrunk_job_is_small_and_has_the_same_plan(path):
    config = load(path)
    small, told = shrink(config)
    job, shrunk = resolve_job(config), resolve_job(small)
    assert shrunk.dims == job.dims
    before, after = make_model_config(config), make_model_config(small)
    assert after.num_parameters < 120_000
    assert shrunk.seq_len <= 192
    assert small.training.global_batch_size <= 16
    # The products of float8 must be multiples of 16 on each rank, so that its widths stay.
    assert after.dim < before.dim or path.stem == "float8"
    assert (f"dim {before.dim} -> {after.dim}" in told) == (after.dim < before.dim)
    check_start(small)
    for section in ("activation_checkpoint", "compile", "optimizer"):
        assert getattr(small, section) == getattr(config, section)
    if job.pipeline is not None:
        assert shrunk.pipeline is not None
        assert shrunk.pipeline.schedule.name == job.pipeline.schedule.name
        assert shrunk.pipeline.schedule.num_stages == job.pipeline.schedule.num_stages


def test_the_reference_has_the_job_and_nothing_of_the_plan():
    config = load(Path(CONFIGS[0]).with_name("pp2_tp2_fsdp2.toml"))
    plan = plan_job(resolve_job(config), "float64")
    alone = reference_job(plan)
    assert alone.dims == ParallelDims()
    assert alone.global_batch_size == alone.config.training.local_batch_size == 32
    for section in ("model", "optimizer", "lr_scheduler", "debug"):
        assert getattr(alone.config, section) == getattr(plan.config, section)
    assert reference_job(plan, num_parts=4).config.training.local_batch_size == 8


def agreement(difference: float = 0.0, digest: str = "") -> Agreement:
    return Agreement(difference, 1.0, 1.0, 1.0, 1.0, digest)


def run_of(rank: int, how: str, start: Agreement, then: Agreement, expected: str = "") -> RankRun:
    after = RankStep(2.0, 1.0, 1e-3, 7, gradients={"w": then}, weights={"w": then})
    steps = [RankStep(weights={"w": start}), after]
    return RankRun(rank, {"tp": rank}, {"w": {"tp": how}}, (), {"w": expected}, steps)


def test_every_rank_counts_and_only_what_is_too_large_fails():
    reference = [ReferenceStep(), ReferenceStep(2.0, 1.0, 1e-3, 7)]
    runs = [run_of(rank, "replicated", agreement(), agreement(rank * 1e-9)) for rank in (0, 1)]
    found = differences(runs, reference)
    assert found[0] == {("start", "w"): 0.0}
    assert found[1]["gradient", "w"] == 1e-9
    failed = failures(found, Tolerance("float64"))
    assert [(f.step, f.kind) for f in failed] == [(1, "gradient"), (1, "weight")]
    # As much as the reference differs from itself is rounding, up to 1e-9.
    runs = [run_of(rank, "replicated", agreement(), agreement(rank * 9e-10)) for rank in (0, 1)]
    rounding = [{}, {("gradient", "w"): 2e-10, ("weight", "w"): 2e-10}]
    assert failures(differences(runs, reference), Tolerance("float64", rounding)) == []
    wrong = [{}, {("gradient", "w"): 0.2, ("weight", "w"): 0.2}]
    runs = [run_of(rank, "replicated", agreement(), agreement(rank * 0.1)) for rank in (0, 1)]
    failed = failures(differences(runs, reference), Tolerance("float64", wrong))
    assert [(f.kind, f.tolerance) for f in failed] == [("gradient", 1e-9), ("weight", 1e-9)]
    # Unless part of the model is known to compute in less.
    tolerance = Tolerance("float64", wrong, is_narrow=True)
    assert failures(differences(runs, reference), tolerance) == []


def test_a_gradient_of_nothing_but_rounding_counts_as_equal():
    reference = [ReferenceStep(), ReferenceStep(2.0, 1.0, 1e-3, 7)]
    (found,) = [run_of(0, "replicated", agreement(), agreement())]
    noise = Agreement(3e-20, 1e-20, 1e-40, 0.0, 1e-40, "")
    found.steps[1].gradients["w"] = noise
    # Adam makes something of it: compared with the largest weight of the model, here 1.
    found.steps[1].weights = {"w": Agreement(2e-12, 1e-12, 0.0, 0.0, 0.0, ""), "large": agreement()}
    of_step = differences([found], reference)[1]
    assert of_step["gradient", "w"] == 0.0
    assert of_step["weight", "w"] == 2e-12
    reference[1].norm = 1e-10
    assert differences([found], reference)[1]["gradient", "w"] == pytest.approx(3.0)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_the_formula_of_the_schedule_is_that_of_what_runs(decay_type):
    section = {"warmup_steps": 3, "decay_ratio": 0.5, "min_lr_factor": 0.1}
    config = JobConfig.from_dict(
        {
            "training": {"steps": 12},
            "lr_scheduler": {**section, "decay_type": decay_type},
            "optimizer": {"lr": 0.01},
        }
    )
    for step in range(1, 13):
        expected = 0.01 * lr_factor(
            step - 1,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            total_steps=config.schedule_steps,
            decay_type=decay_type,
            min_lr_factor=0.1,
        )
        assert scheduled_lr(config, step) == pytest.approx(expected, rel=1e-12)


def test_until_stable_reaches_what_begins_on_the_way():
    config = JobConfig.from_dict(
        {
            "training": {"steps": 60, "gc_freq": 20},
            "lr_scheduler": {"warmup_steps": 10, "decay_ratio": 0.5},
        }
    )
    assert steps_until_stable(config) == (
        33,
        [
            "the end of the warm-up at step 10",
            "the decay at step 31",
            "garbage collection at step 20",
        ],
    )
    steps, told = steps_until_stable(override(config, {"training.steps": 500}))
    assert steps == 200
    assert told[1] == "the decay at step 251, which is not reached"


def test_a_batch_is_held_against_its_parts():
    config = JobConfig.from_dict({"training": {"global_batch_size": 24, "local_batch_size": 3}})
    whole, parts = accumulation_pair(plan_job(resolve_job(config, 2), "float64"))
    assert (whole.global_batch_size, parts.global_batch_size) == (24, 24)
    assert whole.config.training.local_batch_size == 24
    assert parts.config.training.local_batch_size == 6
    one = JobConfig.from_dict({"training": {"global_batch_size": 1, "local_batch_size": 1}})
    assert accumulation_pair(plan_job(resolve_job(one), "float64")) is None


def test_what_is_not_a_number_never_agrees():
    reference = [ReferenceStep(), ReferenceStep(2.0, 1.0, 1e-3, 7)]
    run = run_of(0, "replicated", agreement(), agreement())
    run.steps[1].loss = math.nan
    assert [f.kind for f in failures(differences([run], reference), Tolerance("float64"))] == [
        "loss"
    ]


def test_replicas_and_shards_are_told_apart_by_their_bits():
    def runs(how: str, digests: str, expected: str = "ab") -> list[RankRun]:
        return [
            run_of(r, how, agreement(digest=digests[r]), agreement(digest=digests[r]), expected[r])
            for r in (0, 1)
        ]

    assert unequal_replicas(runs("replicated", "aa")) == []
    assert [(s.step, s.groups) for s in unequal_replicas(runs("replicated", "ab"))] == [
        (0, ((0,), (1,)))
    ]
    assert unequal_replicas(runs("sharded", "ab")) == same_shards(runs("sharded", "ab")) == []
    assert same_shards(runs("sharded", "aa")) == ["w"]
    assert same_shards(runs("sharded", "aa", expected="cc")) == []


def stored_line(**changes: object) -> bytes:
    result = {
        "choice": {"pp": 1, "checkpoint": "none"},
        "num_ranks": 2,
        "steps": 2,
        "agrees": True,
        "seconds": 1.5,
        "cause": "",
        "largest": 0.0,
        "margin": None,
        "of": "the loss at step 1",
        "code": "c0de",
    }
    return json.dumps(result | changes).encode() + b"\n"


def test_a_stored_result_of_wrong_values_is_left_out(tmp_path):
    features = {"pp": [1, 2], "checkpoint": ["none", "full"]}
    path = tmp_path / "results.jsonl"

    def read() -> list[object]:
        return [
            result["choice"] for result in read_results(tmp_path, 2, 2, "c0de", features).values()
        ]

    assert read() == []
    good = stored_line()
    for line in (
        stored_line(choice={"pp": 2, "checkpoint": "rm -r ~"}),
        stored_line(choice={"pp": [2], "checkpoint": "none"}),
        stored_line(choice={"pp": True, "checkpoint": "none"}),
        stored_line(choice={"pp": 2}),
        stored_line(choice="pp"),
        stored_line(choice={"pp": 2, "checkpoint": "none"}, agrees="yes"),
        stored_line(choice={"pp": 2, "checkpoint": "none"}, seconds="<script>"),
        stored_line(choice={"pp": 2, "checkpoint": "none"}, seconds=math.nan),
        stored_line(choice={"pp": 2, "checkpoint": "none"}, margin=-1.0),
        stored_line(choice={"pp": 2, "checkpoint": "none"}, cause=None),
        stored_line(choice={"pp": 2, "checkpoint": "none"}, more=1),
        stored_line(choice={"pp": 2, "checkpoint": "none"}, code="other"),
        b"[1]\n",
        b"\xff\n",
        b"[" * 50_000 + b"\n",
        b'{"choice": {"pp"',
    ):
        path.write_bytes(good + line)
        assert read() == [{"pp": 1, "checkpoint": "none"}], line
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is a pipe or a device, not a file"):
        read()


def test_an_unknown_model_is_bad_input():
    with pytest.raises(ConfigError, match="there is no model"):
        parse_args(["--model.name=none"])


def test_every_rank_of_every_run_starts_with_a_random_state_of_its_own() -> None:
    import random

    import numpy as np
    import torch

    from titanlite.tools.verify import opened

    def draw(*_: object) -> Any:
        numbers = float(torch.rand(())), random.random(), float(np.random.rand())
        return SimpleNamespace(numbers=numbers, trainer=SimpleNamespace(generators="seeded"))

    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), patch.object(opened, "build_job", draw):
            drawn = []
            for rank in (0, 1, 0):
                world, resolved = SimpleNamespace(rank=rank), SimpleNamespace()
                with opened.open_job(*cast(Any, (world, resolved))) as job:
                    drawn.append(cast(Any, job).numbers)
                    # Nor does the job seed its steps.
                    assert job.trainer.generators is None
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    assert all(len(set(of_one_generator)) == 3 for of_one_generator in zip(*drawn, strict=True))


def test_junit_has_a_case_for_each_job_and_only_legal_characters():
    text = to_junit([Case("a.toml", 1.5), Case('"b" & c', 0.25, "DIFFERS: <x>\x1b", "all\x00\n")])
    (suite,) = ElementTree.fromstring(text)
    assert [suite.attrib[name] for name in ("tests", "failures", "time")] == ["2", "1", "1.750"]
    good, bad = suite
    assert (good.attrib["name"], len(good), bad.attrib["name"]) == ("a.toml", 0, '"b" & c')
    assert (bad[0].tag, bad[0].get("message"), bad[0].text) == (
        "failure",
        "DIFFERS: <x>?",
        "all?\n",
    )


def test_an_error_of_verify_itself_has_a_status_of_its_own(capsys, tmp_path):
    with patch("titanlite.tools.verify.verify.Verifier", side_effect=ZeroDivisionError):
        status = main(["verify", TP2, *SYNTHETIC, f"--junit={tmp_path / 'out.xml'}"])
    assert (status, list(tmp_path.iterdir())) == (3, [])
    assert "ZeroDivisionError" in capsys.readouterr().err
