"""`titanlite plan`: its figures by formula, its output, and what it refuses."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titanlite import cli
from titanlite.config import JobConfig, parse_args, resolve_job
from titanlite.schedule import make_schedule
from titanlite.tools.figures.timeline import walk
from titanlite.tools.figures.trace import make_trace
from titanlite.tools.planner.advice import advise
from titanlite.tools.planner.cache import load_applied
from titanlite.tools.planner.command import _read_measured
from titanlite.tools.planner.composition import representatives
from titanlite.tools.planner.events import Trace
from titanlite.tools.planner.hardware import FOLDER, load_hardware
from titanlite.tools.planner.planning import PIECES, plan_job, plannable
from titanlite.tools.planner.trace import trace_rank

BATCH, TOKENS = 4, 64


@pytest.fixture(autouse=True)
def _without_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of a job are planned in test_plan_advice.py."""
    monkeypatch.setattr("titanlite.tools.planner.command.advise", lambda *_: [])


def debug_job(plan: dict[str, Any] | None = None, **training: Any) -> JobConfig:
    return JobConfig.from_dict(
        {
            "model": {"flavor": "debug"},
            "training": {"dataset": "synthetic", "global_batch_size": BATCH, **training},
            "activation_checkpoint": {"mode": "none"},
            "parallelism": {"data_parallel_shard_degree": 1, **(plan or {})},
        }
    )


def trace(config: JobConfig, rank: int = 0) -> Trace:
    return trace_rank(resolve_job(config, None), rank)


def test_operations_and_memory_are_those_of_the_formulas() -> None:
    config = debug_job(local_batch_size=BATCH)
    resolved = resolve_job(config, 1)
    model = resolved.model
    found = trace(config)
    products = 6 * (model.num_parameters - model.num_embedding_parameters - 5 * model.dim)
    # Attention has two products in the forward pass, and five in the backward pass.
    attention = 14 * model.num_layers * model.dim * TOKENS
    assert found.flops == BATCH * TOKENS * (products + attention)
    held = found.held
    # Beside the parameters, dropout has a key of eight bytes in five modules.
    assert held["parameters"] == 4 * model.num_parameters + 5 * 8
    assert held["optimizer state"] == pytest.approx(2 * held["parameters"], rel=0.01)
    peak = found.peak()
    assert peak.num_bytes == sum(peak.bytes_of.values()) > sum(held.values())
    logits = 4 * BATCH * TOKENS * model.vocab_size
    assert peak.bytes_of["activations"] > model.num_layers * 4 * BATCH * TOKENS * model.dim + logits


def test_shards_hold_their_part_and_full_checkpointing_keeps_less() -> None:
    alone = trace(debug_job(local_batch_size=1))
    sharded = trace(debug_job({"data_parallel_shard_degree": 4}, local_batch_size=1))
    assert sharded.held["parameters"] < 0.3 * alone.held["parameters"]
    assert "gathered parameters" in sharded.category_of.values()
    assert "gathered parameters" not in alone.category_of.values()
    values = debug_job(local_batch_size=1).model_dump(exclude_unset=True)
    full = trace(JobConfig.from_dict({**values, "activation_checkpoint": {"mode": "full"}}))
    assert full.flops > 1.25 * alone.flops
    assert full.peak().bytes_of["activations"] < 0.5 * alone.peak().bytes_of["activations"]
    phases = {operator.place.phase for operator in full.operators}
    assert phases == {"forward", "recomputation", "backward", "optimizer"}


def test_a_compiled_block_keeps_what_its_partition_saves() -> None:
    values = debug_job(local_batch_size=1).model_dump(exclude_unset=True)
    eager, compiled = (
        trace(JobConfig.from_dict({**values, "compile": {"enable": enable}}))
        for enable in (False, True)
    )
    assert compiled.flops == eager.flops
    assert compiled.peak().bytes_of["activations"] < 0.9 * eager.peak().bytes_of["activations"]


def test_a_world_of_thousands_of_ranks_is_traced_in_one_process() -> None:
    plan = {"data_parallel_replicate_degree": 8, "tensor_parallel_degree": 4}
    sizes = {"global_batch_size": 256, "local_batch_size": 1}
    found = trace(debug_job({**plan, "data_parallel_shard_degree": 32}, **sizes), rank=1023)
    assert found.coordinates["dp_shard"] == 31
    kinds = {(one.kind, one.axis): one.num_ranks for one in found.communications}
    assert kinds["all_gather", "dp_shard"] == 32
    assert kinds["all_reduce", "dp_replicate"] == 8
    assert kinds["reduce_scatter", "tp"] == 4


def test_ranks_of_all_kinds_of_stages_are_traced() -> None:
    for stages, expected in ((1, [0]), (4, [0, 2, 4, 6]), (16, [0, 2, 16, 30])):
        plan = {
            "pipeline_parallel_degree": stages,
            "tensor_parallel_degree": 2 if stages > 1 else 1,
        }
        dims = resolve_job(
            JobConfig.from_dict(
                {
                    "model": {"flavor": "debug", "num_layers": 32},
                    "training": {"dataset": "synthetic", "local_batch_size": 32},
                    "parallelism": {"data_parallel_shard_degree": 1, **plan},
                }
            ),
            None,
        ).dims
        assert representatives(dims) == expected


def test_the_last_rank_of_a_contiguous_ring_is_traced() -> None:
    plan = {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}
    dims = resolve_job(debug_job(plan, local_batch_size=BATCH), None).dims
    assert representatives(dims, "headtail") == representatives(dims) == [0, 2]
    assert representatives(dims, "none") == [1, 3]


def test_the_command_shows_bars_bytes_and_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job, figures = tmp_path / "job.toml", tmp_path / "figures.json"
    job.write_text(
        '[model]\nflavor = "debug"\n[training]\ndataset = "synthetic"\nglobal_batch_size = 8\n'
        'local_batch_size = 4\n[job]\ndevice = "cuda"\n'
    )
    page, trace, picture = (tmp_path / name for name in ("page.html", "trace.json", "out.svg"))
    options = ["--parallelism.pipeline_parallel_degree=2", "--json", str(figures)]
    options += [
        "--hardware",
        "a100",
        "--html",
        str(page),
        "--trace",
        str(trace),
        "--svg",
        str(picture),
    ]
    assert cli.main(["plan", str(job), "--parallelism.tensor_parallel_degree=2", *options]) == 0
    shown = capsys.readouterr().out
    assert "image_transformer, flavor debug: " in shown
    assert " ".join(shown.split()).count("tensor parallel TP 2 TP 2") == 1
    assert "mesh: pp 2 x tp 2 = 4 ranks" in shown
    assert "rank 0" in shown
    assert "rank 2" in shown
    assert "tp (TP)\n      all_gather" in shown
    assert "note: device: without a GPU here" in shown
    top, _, _ = shown.partition("image_transformer, flavor debug: ")
    assert re.search(r"\nmemory [^:]*: it\s+fits\nstep .*\nspeed .*/s/rank\nMFU .*, idle ", top)
    written = json.loads(figures.read_text())
    found, time = written["ranks"], written["time"]
    assert set(time["ranks"]) == {"0", "2"}
    for rank in time["ranks"].values():
        parts = [*rank["compute_seconds"].values(), rank["launch_seconds"], rank["idle_seconds"]]
        parts += [one["exposed_seconds"] for one in rank["traffic"]]
        assert sum(parts) == pytest.approx(time["seconds"])
    assert "<!DOCTYPE html>" in page.read_text()
    idle = f"idle {written['time']['bubble']:.1%}"
    assert re.search(rf"step (\S+ m?s), {idle}; its schedule: .* by rank", picture.read_text())
    assert f", {idle}" in " ".join(top.split())
    kinds = [event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]]
    # Each of the two stages sends or receives every microbatch once.
    assert kinds.count("forward") == 2 * num_microbatches(written)
    assert [one["rank"] for one in found] == [0, 2]
    sent = [one for one in found[0]["communications"] if one["kind"] == "send"]
    assert sent[0]["axis"] == "pp"
    assert found[0]["peak"]["bytes"] == sum(found[0]["peak"]["bytes_of"].values())


def num_microbatches(written: dict[str, Any]) -> int:
    sends = [one for one in written["ranks"][0]["communications"] if one["kind"] == "send"]
    return int(sends[0]["count"])


def test_a_large_job_whose_pieces_are_known_is_planned_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = ["--training.global_batch_size=512", "--training.local_batch_size=1"]
    words = ["--model.flavor=debug", "--training.dataset=synthetic", *sizes]
    words.append("--activation_checkpoint.mode=full")
    h100 = load_hardware("h100")
    config, _ = plannable(parse_args(words), hardware=h100)
    resolved = resolve_job(config, None)
    assert (plan := plan_job(resolved, h100)).method == PIECES
    assert advise(plan, resolved)
    load_applied(resolved)
    job, page = tmp_path / "job.toml", tmp_path / "page.html"
    job.write_text("")
    arguments = ["plan", str(job), "--hardware", "h100", "--html", str(page), *words]
    code = f"import sys; from titanlite.cli import main; main({arguments!r}); print(*sys.modules)"
    run = [sys.executable, "-c", code]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert "activation checkpoint  full" in shown
    assert "time of a rank in a step" in shown
    assert "torch" not in shown.splitlines()[-1].split()
    assert page.stat().st_size > 10_000


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["plan", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err
    job = tmp_path / "job.toml"
    job.write_text('[model]\nflavor = "debug"\n[parallelism]\ntensor_parallel_degree = 3\n')
    assert cli.main(["plan", str(job)]) == 2
    assert "parallelism.tensor_parallel_degree: 3" in capsys.readouterr().err
    assert cli.main(["plan", str(job), "--ranks", "0"]) == 2
    assert "--ranks: 0 is less than 1" in capsys.readouterr().err
    assert cli.main(["plan", str(job), "--hardware", "a1000"]) == 2
    assert "'a1000' is not known; did you mean a100?" in capsys.readouterr().err
    assert cli.main(["plan"]) == 2
    assert "job: is missing" in capsys.readouterr().err
    assert cli.main(["plan", "--calibrate", "/dev/null/cpu.toml"]) == 2
    assert '--calibrate: "/dev/null/cpu.toml" cannot be written' in capsys.readouterr().err
    job.write_text('[model]\nflavor = "debug"\n[training]\ndataset = "synthetic"\n')
    assert cli.main(["plan", str(job), "--json", "/dev/null/f.json"]) == 2
    assert "f.json: cannot be written" in capsys.readouterr().err
    for option in ("--trace", "--svg"):
        assert cli.main(["plan", str(job), option, "out.json"]) == 2
        assert f"{option}: a step has no times without --hardware" in capsys.readouterr().err
    timed = ["plan", str(job), "--hardware", "h100"]
    assert cli.main([*timed, "--svg", "out.svg"]) == 2
    assert "--svg: the job has no pipeline to draw" in capsys.readouterr().err
    assert cli.main([*timed, "--measured", str(job)]) == 2
    assert "--measured: it is drawn in a picture; give --svg" in capsys.readouterr().err
    assert cli.main([*timed, "--svg", "out.svg", "--measured", str(job)]) == 2
    assert "job.toml is not the trace of a pipeline" in capsys.readouterr().err
    assert cli.main([*timed, "--svg", "out.svg", "--measured", str(tmp_path / "none")]) == 2
    assert "none cannot be read (No such file" in capsys.readouterr().err
    assert cli.main([*timed, "--svg", "out.svg", "--measured", str(tmp_path)]) == 2
    assert "has no pipeline_step_N.json; give another folder" in capsys.readouterr().err


def test_of_a_folder_of_measured_steps_the_fastest_is_drawn(tmp_path: Path) -> None:
    for step, seconds in ((1, 3.0), (2, 1.0), (3, 2.0)):
        timeline = walk(make_schedule("GPipe", 2, 2), lambda rank, action, of=seconds: of)
        (tmp_path / f"pipeline_step_{step}.json").write_text(make_trace(timeline))
    fastest = _read_measured(str(tmp_path), "out.svg")
    alone = _read_measured(str(tmp_path / "pipeline_step_2.json"), "out.svg")
    slow = _read_measured(str(tmp_path / "pipeline_step_3.json"), "out.svg")
    assert fastest is not None
    assert alone is not None
    assert slow is not None
    assert fastest.end == alone.end < slow.end


def test_offload_is_planned_on_the_device_that_the_hardware_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, alone, written = tmp_path / "job.toml", tmp_path / "alone.toml", tmp_path / "plan.json"
    job.write_text(
        '[model]\nflavor = "debug"\n[training]\ndataset = "synthetic"\nenable_cpu_offload = true\n'
        "[parallelism]\ndata_parallel_shard_degree = 2\n"
    )
    arguments = ["plan", str(job), "--json", str(written)]
    assert cli.main([*arguments, "--hardware=h100"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "parameters on the CPU, pinned",
        "of a rank's 233 GiB of the host's memory at the peak",
        "the host's memory of a rank at its peak, for CPU offload",
        "U optimizer on the host",
        "K offload, exposed",
        "offload (host link)",
        "to_device",
    ):
        assert text in shown
    found = json.loads(written.read_text())
    (rank,) = found["ranks"]
    held, on_host = rank["held_bytes"], rank["held_on_host_bytes"]
    assert on_host["optimizer state"] > held["optimizer state"] == 0
    assert rank["host_peak"]["bytes"] == found["host_bytes"] > 0
    assert found["hardware"]["host_memory_bytes"] == 250e9
    # On CPU all memory is one.
    assert cli.main([*arguments, "--hardware=cpu"]) == 0
    assert "note: offload: planned on CPU, where device and host are one" in capsys.readouterr().out
    assert json.loads(written.read_text())["host_bytes"] == 0
    text = (FOLDER / "h100.toml").read_text()
    start = text.index("[host]")
    alone.write_text(text[:start] + text[text.index("[fitted]", start) :])
    assert cli.main([*arguments, "--hardware", str(alone)]) == 2
    assert capsys.readouterr().err == (
        "titanlite plan: --hardware: NVIDIA H100 SXM 80 GB has no [host], which "
        "training.enable_cpu_offload needs; add the figures of its host's memory and link, or turn "
        "offload off\n"
    )
    # The same job fits without offload's figures if it is not offloaded.
    arguments.append("--training.enable_cpu_offload=false")
    assert cli.main([*arguments, "--hardware", str(alone)]) == 0


def test_a_host_that_is_too_small_is_named() -> None:
    plan = {"data_parallel_shard_degree": 2}
    config = debug_job(plan, local_batch_size=2, enable_cpu_offload=True)
    h100 = load_hardware("h100")
    assert h100.host is not None
    small = replace(h100, host=replace(h100.host, num_bytes=1e5))
    planned, _ = plannable(config, hardware=small)
    found = plan_job(resolve_job(planned, None), small, use_cache=False, method=PIECES)
    assert found.peak_bytes < small.memory.num_bytes
    (warning,) = (text for text in found.warnings if "does not fit" in text)
    assert warning.startswith("does not fit: CPU offload needs")
    assert "of the host's memory for a rank, whose share of it is 97.7 KiB" in warning


def test_a_job_with_experts_has_a_time_and_the_traffic_of_its_own_axis(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = str(Path(__file__).parents[4] / "configs" / "moe_ep4.toml")
    small = ["--model.flavor=moe_debug", "--training.seq_len=64"]
    trace = f"--trace={tmp_path / 'trace.json'}"
    assert cli.main(["plan", job, *small, "--hardware=a100", trace]) == 0
    shown = capsys.readouterr().out
    assert "all-to-all" in shown or "all_to_all" in shown
    assert "E ep, exposed" in shown
    assert "experts: planned as if all had equally many tokens" in shown
    traced = json.loads((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in traced["traceEvents"]}
    assert "backward of layers.1.moe.experts" in names
