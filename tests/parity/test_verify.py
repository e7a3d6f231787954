"""`titanlite verify` as a user calls it, on real ranks."""

from __future__ import annotations

import functools
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import make_pictures
import pytest
import recorded_bugs

import titanlite
from titanlite.cli import main
from titanlite.config import JobConfig, parse_args
from titanlite.errors import ConfigError, TitanliteError
from titanlite.tools.verify.matrix import features_of, plans_of, run_matrix
from titanlite.tools.verify.report import format_verification
from titanlite.tools.verify.shrink import shrink

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_right_plan(capsys, tmp_path):
    out = tmp_path / "out.json"
    config = str(CONFIGS / "tp2_fsdp2.toml")
    assert main(["verify", config, "--shrink", "--steps=2", f"--json={out}"]) == 0
    printed = capsys.readouterr().out
    assert "dp_shard 2 x tp 2, 4 ranks" in printed
    assert "shrunk     dim 96 -> 48" in printed
    assert ", generated data\n" in printed
    assert "\nAGREES: " in printed
    found = json.loads(out.read_text())
    assert found["agrees"]
    assert found["margin"] > 100
    assert found["failures"] == found["diagnosis"] == []
    assert [row["step"] for row in found["steps"]] == [0, 1, 2]
    assert found["steps"][1]["gradients"].keys() == found["steps"][1]["weights"].keys()
    assert 0 < max(found["steps"][2]["weights"].values()) < 1e-13


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_is_judged_by_the_references_own_rounding(verifier, dtype):
    config, _ = shrink(parse_args([f"--job.config_file={CONFIGS / 'hsdp2x2.toml'}"]))
    found = verifier.verify(config, steps=3, dtype=dtype)
    assert found.agrees, found.findings
    step, key = found.worst
    assert 1e-9 < found.differences[step][key] < found.tolerance.of(step, key) < 2.0
    weights = [found.tolerance.of(3, key) for key in found.differences[3] if key[0] == "weight"]
    assert (max(weights) < 1e-3) == (dtype == "float32")


def test_a_wrong_plan_of_a_users_own_model(tmp_path, monkeypatch, capsys):
    """The example of docs/verify.md: a model in a folder, with one wrong entry in its plan."""
    make_pictures.write_wrong_plan(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Ranks look for modules where this process does.
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["verify", "own.toml", "--steps=2", "--json=out.json", "--junit=j.xml"]) == 1
    printed = make_pictures.words_of(capsys.readouterr().out)
    for shown in ("verify.md", "images/differs.svg"):
        assert make_pictures.words_of((CONFIGS.parent / "docs" / shown).read_text()) == printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert not found["agrees"]
    assert found["failures"][0]["step"] == 1
    (case,) = ElementTree.parse(tmp_path / "j.xml").iter("testcase")
    assert case.attrib["name"] == "own.toml"
    message = case[0].attrib["message"]
    assert message.startswith("DIFFERS: the loss, ")
    assert message.endswith(found["diagnosis"][0])


def odd_job(flavor: str, **parallelism: int) -> JobConfig:
    return JobConfig.from_dict(
        {
            "model": {"name": "odd", "flavor": flavor},
            "training": {"global_batch_size": 8, "local_batch_size": 4},
            "parallelism": parallelism,
            "experimental": {"custom_import": "odd_model"},
        }
    )


@pytest.mark.parametrize(
    ("flavor", "dtype", "line"),
    [
        ("dropout", "float64", "on one process the same batch gives another loss at step 1"),
        ("not finite", "float64", "on one process the loss of step 1 is nan"),
        (
            "batch statistics",
            "float32",
            r"the output of output \(Linear\) for a sequence depends on",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(verifier, flavor, dtype, line):
    job = odd_job(flavor, data_parallel_replicate_degree=2, data_parallel_shard_degree=1)
    with pytest.raises(ConfigError, match=f"^model.name: {line}"):
        verifier.verify(job, steps=1, dtype=dtype)


def test_batch_statistics_are_named_in_a_pipeline(verifier):
    job = odd_job("batch statistics", pipeline_parallel_degree=2)
    with pytest.raises(ConfigError, match=r"^model.name: the output of output \(Linear\) .*Group"):
        verifier.verify(job, steps=1)


def test_a_module_that_rounds_to_a_narrower_dtype_is_named(verifier):
    job = odd_job("rounds", data_parallel_replicate_degree=2, data_parallel_shard_degree=1)
    found = verifier.verify(job, steps=2)
    assert found.agrees, found.findings
    assert found.narrowed == ("the model (float64 to float32)",)
    assert "the model (float64 to float32) rounds to a narrower dtype" in " ".join(
        format_verification(found).split()
    )


def test_a_plan_that_takes_its_loss_by_rows_agrees(verifier):
    sections = {
        "model": {"flavor": "debug"},
        "training": {"dataset": "synthetic", "global_batch_size": 8, "local_batch_size": 4},
        "parallelism": {"context_parallel_degree": 2},
    }
    few = functools.partial(patch, "titanlite.training.loss.LARGEST_CHUNK", 1000)
    assert verifier.verify(JobConfig.from_dict(sections), steps=2, patch=few).agrees


def test_what_goes_on_from_a_checkpoint_is_compared(verifier):
    job = odd_job("none", data_parallel_shard_degree=2)
    assert verifier.verify(job, steps=1, reloads=True).agrees
    found = verifier.verify(
        job, steps=1, reloads=True, patch=recorded_bugs.optimizer_state_forgotten
    )
    assert not found.agrees
    assert found.cause.startswith(
        "everything agrees until the checkpoint is saved. A run that resumes from it has different "
    )


def test_gradients_reduced_in_another_dtype_are_seen(verifier):
    job = odd_job("none", data_parallel_shard_degree=2)
    found = verifier.verify(job, steps=1, dtype="bfloat16", patch=recorded_bugs.reduced_in_bfloat16)
    assert not found.agrees
    assert "over dp_shard is in bfloat16" in found.cause


def test_a_model_that_does_not_run_shows_where(verifier):
    job = odd_job("raises", tensor_parallel_degree=2, data_parallel_shard_degree=1)
    with pytest.raises(TitanliteError) as raised:
        verifier.verify(job, steps=1)
    *_, last = str(raised.value).splitlines()
    assert last == "the job does not run on one process: ValueError: this model does not run"
    assert 'odd_model/model.py", line' in str(raised.value)


def test_weights_without_gradients_are_compared(verifier):
    job = odd_job("frozen", tensor_parallel_degree=2, data_parallel_shard_degree=1)
    found = verifier.verify(job, steps=1, dtype="float32")
    assert found.agrees, found.findings
    assert "AGREES: max difference " in format_verification(found)


def test_a_module_that_is_called_twice_is_no_cause(verifier):
    job = odd_job("called twice", tensor_parallel_degree=2, data_parallel_shard_degree=1)
    assert verifier.verify(job, steps=1).agrees
    job = odd_job("called twice", data_parallel_replicate_degree=2, data_parallel_shard_degree=1)
    found = verifier.verify(job, steps=1, patch=recorded_bugs.reduced_twice)
    assert found.cause.startswith("all 9 gradients are 2 times as large as on"), found.findings


@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_matrix_has_every_schedule_with_every_degree(num_ranks):
    plans = plans_of(num_ranks)
    features = features_of(num_ranks)
    for pp in features["pp"][1:]:
        for schedule in features["schedule"][1:]:
            assert any((p["pp"], p["schedule"]) == (pp, schedule) for p in plans)
    for name, values in features.items():
        assert {plan[name] for plan in plans} == set(values)


@pytest.mark.slow
def test_the_matrix_of_a_model_with_experts_has_expert_parallelism(verifier, tmp_path):
    sections = {
        # Schedules with two stages a rank need four blocks on two ranks.
        "model": {"name": "llama3", "flavor": "moe_debug", "n_layers": 4},
        "training": {"dataset": "synthetic", "seq_len": 32},
    }
    job = JobConfig.from_dict(sections)
    assert "ep" not in features_of(4)
    plans = plans_of(2, job=job)
    for name, values in features_of(2, job=job).items():
        assert {plan[name] for plan in plans} == set(values)
    stream, folder = io.StringIO(), tmp_path
    options = {"num_ranks": 2, "limit": 4, "stream": stream, "verifier": verifier}
    assert run_matrix(folder=folder, job=job, **options) == 0, stream.getvalue()
    assert "ep 2" in stream.getvalue()


def test_a_reduced_matrix_and_its_overview(verifier, tmp_path):
    def run(limit: int) -> str:
        stream = io.StringIO()
        status = run_matrix(
            num_ranks=2,
            folder=tmp_path,
            limit=limit,
            stream=stream,
            verifier=verifier,
            junit=str(tmp_path / "junit.xml"),
        )
        assert status == 0, stream.getvalue()
        return stream.getvalue()

    first = run(3)
    assert "0 are done, 3 to run" in first
    assert "3 plans, all agree" in first
    # Half a line, as a run that was stopped leaves it.
    with (tmp_path / "results.jsonl").open("a") as lines:
        lines.write('{"choice": {"pp"')
    assert "3 are done, 1 to run" in run(4)
    assert "4 are done, 0 to run" in run(4)
    assert 'tests="4" failures="0"' in (tmp_path / "junit.xml").read_text()
    page = (tmp_path / "overview.html").read_text()
    assert page.count("<tr data-plan") == 4
    assert "no legal plan" in page
    assert "#d6453d" not in page.split("<svg")[1].split("</svg>")[0], "nothing differs"


def test_verify_and_plan_from_python() -> None:
    job = {"parallelism": {"tensor_parallel_degree": 2}, "model": {"flavor": "debug"}}
    result = titanlite.verify(
        job, changes={"parallelism.disable_loss_parallel": True}, shrink=True, steps=1
    )
    assert result.check().agrees
    assert "generated data" in result.shrunk
    assert result.figures["degrees"]["tp"] == 2
    assert re.search(r"^AGREES: .*\nplan       tp 2", str(result), re.DOTALL)
    wrong = replace(result, found=replace(result.found, problems=["a norm is wrong"]))
    with pytest.raises(AssertionError, match="DIFFERS"):
        wrong.check()
    plan = titanlite.plan(job, hardware="h100", ranks=4)
    assert plan.figures["num_ranks"] == 4
    assert plan.peak_bytes == plan.figures["peak_bytes"] > 0
    assert plan.step_seconds == plan.figures["time"]["seconds"] > 0
    assert "memory" in str(plan)
    with pytest.raises(ConfigError, match=r"^parallelism\.tensor_parallel_degree: 3 does not"):
        titanlite.verify(job, changes={"parallelism.tensor_parallel_degree": 3})
