"""Jobs of TorchTitan as it is installed, verified in this process, and what is said of bad ones."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module, metadata
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import make_examples
import pytest
import torch.distributed as dist

from titanlite.cli import main
from titanlite.config import JobConfig
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.report import Call
from titanlite.ranks.settings import ignore_warnings
from titanlite.ranks.threads import thread_world
from titanlite.ranks.world import open_world
from titanlite.tools.planner.cost import computed_flops
from titanlite.tools.planner.events import Allocation
from titanlite.tools.planner.hardware import load_hardware
from titanlite.tools.planner.planning import JobPlan
from titanlite.tools.torchtitan import command, options
from titanlite.tools.torchtitan.job import OWN_DTYPE, TitanJob, _takes_spmd_types
from titanlite.tools.torchtitan.stand_ins import MovedError, standing_in

tomllib = pytest.importorskip("tomllib")

MISSING = make_examples.missing_torchtitan()
needs_torchtitan = pytest.mark.skipif(bool(MISSING), reason=MISSING)
TP2, FSDP2 = (
    f"--parallelism.{axis}_degree=2" for axis in ("tensor_parallel", "data_parallel_shard")
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


@needs_torchtitan
@pytest.mark.parametrize(
    ("job", "status", "said"),
    [
        pytest.param("llama3_debugmodel", 0, ("AGREES", "2 of 6 layers"), id="its own"),
        pytest.param(
            "torchtitan_plan.configs:unreduced_embedding",
            1,
            ("likely cause: tok_embeddings is the first module in forward order",),
            id="wrong output layout",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "torchtitan_plan.configs:divided_block",
            1,
            ("layers.1.attention.wo.weight", "0.5 times as large as on one process"),
            id="wrong division",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            # Of the release itself: https://github.com/pytorch/torchtitan/pull/4332
            "gpt_oss_debugmodel",
            1,
            ("layers.0.attention.wo.bias", "0.5 times as large as on one process"),
            id="its own, wrong bias",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan(
    job: str, status: int, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = gc.isenabled(), logging.root.manager.disable, dict(os.environ)
    command = ["verify", f"torchtitan:{job}", TP2, FSDP2, "--steps=1"]
    assert main([*command, "--parallelism.spmd_backend=partial_dtensor"]) == status
    assert (gc.isenabled(), logging.root.manager.disable, dict(os.environ)) == before
    out = " ".join(capsys.readouterr().out.split())
    assert all(text in out for text in said), out


@needs_torchtitan
@pytest.mark.slow
def test_distributed_muon_steps_as_whole_tensors_do(capsys: pytest.CaptureFixture[str]) -> None:
    job = "torchtitan:torchtitan_plan.configs:muon"
    assert main(["verify", job, FSDP2, "--steps=2"]) == 0
    assert "replaced DistMuon: streams" in " ".join(capsys.readouterr().out.split())
    runtime = import_module("torchtitan.distributed.flex_shard._optimizer_reshard_runtime")
    # What other ranks computed is not added to weights.
    with patch.object(runtime, "_finalize_redistributed"):
        assert main(["verify", job, FSDP2, "--steps=1"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the step leaves 2 of 17 weights (layers.0.feed_forward.w1.weight" in said, said


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mean_of_own_tokens", "loss_summed_over_dp_only", "expert_input_gradient_not_summed"]
)
def test_a_recorded_fault_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs/evidence")
    faults = import_module("torchtitan_faults.upstream")
    monkeypatch.setattr(faults, "setattr", monkeypatch.setattr, raising=False)
    fault = faults.ALTERED[name]
    job = f"torchtitan:torchtitan_faults.upstream:{name}"
    assert main(["verify", job, *fault.plan, "--steps=1"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(f"likely cause: .*?({fault.says})", out), out


@needs_torchtitan
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama3_debugmodl"], "did you mean llama3_debugmodel"),
        (["torchtitan_plan.configs:rigth"], "has no function rigth; did you mean right?"),
        (["nowhere.configs:job"], "No module named 'nowhere'; give PACKAGE.MODULE:FUNCTION"),
        (
            ["llama3_debugmodel", "--parallelism.tensor_paralel_degree=2"],
            "Unrecognized options: --parallelism.tensor_paralel_degree=2; did you mean",
        ),
        (
            ["llama3_debugmodel", "--parallelism.pipeline_parallel_degree=2"],
            "Set --training.disable_cuda_graphs.",
        ),
        (["llama3_debugmodel", TP2, "--ranks=3"], "--ranks: 3 ranks do not fit the degrees"),
        (["llama3_debugmodel", "--dtype=bfloat16"], "--dtype: bfloat16 says little of a plan"),
        (["llama3_debugmodel_dist_gemm", "--dtype=float32"], "--dtype: RowParallelLinear calls"),
        (["llama3_debugmodel", "torchtitan:b"], "torchtitan:b: is a second job; give one"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = arguments
    assert main(["verify", f"torchtitan:{name}", *rest]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@needs_torchtitan
def test_the_debugger_stops_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with patch("sys.stdin", StringIO("others\nq\n")):
        job = "torchtitan:torchtitan_plan.configs:stopped"
        backend = "--parallelism.spmd_backend=partial_dtensor"
        assert main(["debug", job, TP2, backend, "--rank=1"]) == 1
    out = capsys.readouterr().out
    # Which of two ranks goes on after a collective differs between versions of torch.
    assert re.search(r"rank 0 is .*/torchtitan/(protocols/module|models/llama3/model)\.py:\d+", out)
    assert "rank 1 is at tests/parity/torchtitan_plan/configs.py" in out


@needs_torchtitan
def test_a_configuration_as_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "torchtitan:llama3_8b", TP2]) == 0
    text = capsys.readouterr().out
    assert '# spmd_backend = "spmd_types": titanlite lacks it' in text
    job = JobConfig.from_dict(tomllib.loads(text.replace('dataset = "c4"', 'dataset = "pydoc"')))
    assert (job.parallelism.tensor_parallel_degree, job.training.seq_len) == (2, 8192)


class Counted:
    """How often each collective of rank 0 is called, by its ranks and the bytes of its tensors."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    def collective(
        self, rank: int, call: Call, ranks: tuple[int, ...], given: Sequence[Any], results: Any
    ) -> int:
        if rank == 0 and len(ranks) > 1:
            size = max(sum(tensor.nbytes for tensor in some) for some in (given, results))
            self.found[call.operation, ranks, size] += 1
        return 0

    waits: Callable[..., Any] = staticmethod(nullcontext)


def real_step(place: Place, job: TitanJob) -> Counter[tuple[str, tuple[int, ...], int]]:
    """The collectives of rank 0 in its second step, with values."""
    from titanlite.tools.torchtitan.plan import zeros

    with open_world(place):
        config = job.plan().config
        config.metrics.log_freq = sys.maxsize
        ignore_warnings()
        trainer = config.build()
        trainer.step = 2
        trainer.train_step(zeros(trainer))
        exchange: Any = thread_world().exchange
        dist.barrier()
        exchange.listener = exchange.listener or Counted()
        trainer.train_step(zeros(trainer))
        found: Counter[tuple[str, tuple[int, ...], int]] = exchange.listener.found
        return found


@needs_torchtitan
@pytest.mark.parametrize(
    ("name", "tp", "fsdp", "ep"),
    [
        pytest.param("llama3_debugmodel", 2, 2, 1, id="tp 2 x fsdp 2", marks=pytest.mark.slow),
        pytest.param("llama3_debugmodel", 2, 1, 1, id="tp 2", marks=pytest.mark.slow),
        pytest.param("llama3_debugmodel", 1, 2, 1, id="fsdp 2"),
        # Its router sends each expert as many tokens.
        pytest.param("deepseek_v3_debugmodel", 1, 2, 2, id="ep 2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3_debugmodel", 1, 4, 2, id="ep 2 of 4", marks=pytest.mark.slow),
    ],
)
def test_a_planned_step_is_that_of_real_ranks(name: str, tp: int, fsdp: int, ep: int) -> None:
    from titanlite.tools.torchtitan.plan import trace_rank

    keys = {"tensor_parallel": tp, "data_parallel_shard": fsdp, "expert_parallel": ep}
    options = [f"--parallelism.{key}_degree={value}" for key, value in keys.items()]
    options += ["--training.seq_len=64", "--training.local_batch_size=2"]
    if ep > 1:
        options += ["--training.disable_cuda_graphs", "--debug.moe_force_load_balance"]
    job = TitanJob(name, tuple(options), OWN_DTYPE)
    with standing_in():
        trace = trace_rank(job, None, 0).trace
        found = spawn(real_step, tp * fsdp, job, threads=True)[0]
    everyone = tuple(range(tp * fsdp))
    ranks_of = {"tp": (0, 1), "dp_shard": everyone[::tp], "world": everyone, "ep": (0, 1)}
    ranks_of["efsdp"] = everyone[::ep]
    assert found == Counter(
        (one.kind, ranks_of[one.axis], one.num_bytes)
        for one in trace.communications
        if one.num_ranks > 1
    )
    if ep > 1:
        assert ("all_to_all", "ep") in trace.totals()
        return
    # A vocabulary of 2,048, two blocks of width 256 and 768; tensor parallelism shards no norm.
    weights, norms = 2 * 2048 * 256 + 2 * (4 * 256**2 + 3 * 256 * 768), 5 * 256
    local = 4 * (weights // tp + norms) // fsdp
    rope = 2 * 64 * 16 * 4
    assert trace.held["parameters"] == local + rope
    # And a number of steps for each of seven weights a block and three others.
    assert trace.held["optimizer state"] == 2 * local + 4 * (2 * 7 + 3)
    made = [one for one in trace.events if isinstance(one, Allocation) and one.num_bytes]
    of = trace.category_of
    assert sum(one.num_bytes for one in made if of[one.block] == "gradients") == local


@needs_torchtitan
@pytest.mark.slow
def test_a_plan_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "torchtitan:llama3_debugmodel", "--ranks=64", "--hardware=h100"]
    assert main([*command, f"--json={tmp_path / 'plan.json'}", TP2]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "dp_shard 32 x tp 2, 64 ranks" in out
    assert "FlexAttention: a causal flash kernel" in out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["time"]["seconds"] > 0
    assert found["ranks"][0]["peak"]["bytes"] == found["peak_bytes"] > 0


def planned(*titan: str) -> JobPlan:
    """The debug model of Llama 3, on small rows, on an H100."""
    from titanlite.tools.torchtitan.plan import plan_job

    small = ["--training.seq_len=64", "--training.disable_cuda_graphs"]
    given = options.Options("llama3_debugmodel", [*small, *titan])
    return plan_job(given, load_hardware("h100"))[0]


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.skipif(not _takes_spmd_types(), reason="stages need torch 2.14")
@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        ("1F1B", "FFBFBFBB"),
        ("GPipe", "FFFFBBBB"),
        ("Interleaved1F1B", "FFFFFBFBFBFBBBBB"),
        # The first stage has no gradient of its input to compute.
        ("ZBVZeroBubble", "FFFFIWFIWFWFIWWFIWWW"),
    ],
)
def test_the_time_of_a_pipeline(schedule: str, kinds: str) -> None:
    found = planned(
        "--parallelism.pipeline_parallel_degree=2",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        "--training.local_batch_size=4",
        FSDP2,
        "activation-checkpoint:none",
    )
    assert found.prediction is not None
    spans = [one for one in found.prediction.timeline.spans if one.row == 0 and one.kind in "FBIW"]
    assert "".join(one.kind for one in spans) == kinds
    assert 0 < found.prediction.bubble < 1
    for one in found.ranks:
        of = found.prediction.step.ranks[one.rank]
        # Each operator of the trace is in one action.
        assert of.flops == one.flops
        assert {item.axis for item in of.traffic} == {"dp_shard", "pp"}


@needs_torchtitan
@pytest.mark.parametrize("attention", ["", pytest.param("_flex", marks=pytest.mark.slow)])
def test_the_scores_of_a_sliding_window_are_counted(attention: str) -> None:
    from titanlite.tools.torchtitan.plan import trace_rank

    small = (
        "--training.seq_len=512",
        "--training.local_batch_size=1",
        "activation-checkpoint:none",
    )
    job = TitanJob(f"gpt_oss_debugmodel{attention}", small, OWN_DTYPE)
    with standing_in():
        found = [one for one in trace_rank(job, None, 0).trace.operators if one.causal]
    (window, *_), (whole, *_) = (
        [one for one in found if one.causal == of] for of in ((512, 512, 128), (512, 512))
    )
    assert whole.flops == 4 * window.flops
    # Of 128 keys a query, the first 127 queries lack 127 * 128 / 2.
    assert computed_flops(window, "gpu") == pytest.approx(
        window.flops * (1 - 127 * 128 / 2 / (512 * 128))
    )


@needs_torchtitan
@pytest.mark.slow
def test_cpu_offload_is_planned() -> None:
    (rank,) = planned(FSDP2, "--training.enable_cpu_offload").ranks
    (kept,) = planned(FSDP2).ranks
    rope = 6 * 64 * 16 * 4
    assert rank.held["parameters"] == rope
    assert rank.held_on_host["parameters"] == kept.held["parameters"] - rope
    assert rank.held_on_host["optimizer state"] == kept.held["optimizer state"]
    assert rank.host is not None
    assert rank.peak.num_bytes < kept.peak.num_bytes
    assert rank.totals["to_host", "offload"][1] == rank.held_on_host["parameters"]
    copies = {key: of for key, of in rank.totals.items() if key[1] == "offload"}
    assert kept.totals == {key: of for key, of in rank.totals.items() if key not in copies}


@needs_torchtitan
@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("llama3_debugmodel", "--parallelism.pipeline_parallel_degree=2", "which needs torch 2.14"),
        ("llama3_8b_mxfp8", TP2, "MXFP8 is only supported on SM100"),
    ],
)
def test_what_is_not_planned_is_said(
    name: str, key: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = "--training.disable_cuda_graphs", "--parallelism.spmd_backend=partial_dtensor"
    assert main(["plan", f"torchtitan:{name}", key, *others]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_command_takes_the_options_that_its_help_has() -> None:
    for text, taken in (
        (command.HELP, {*options.VALUES, *options.FLAGS}),
        (command.DEBUG_HELP, {*options.OF_DEBUG, *options.DEBUG_FLAGS}),
        (command.PLAN_HELP, {*options.OF_PLAN}),
    ):
        assert set(re.findall(r"^  (--[a-z]+) ", text, re.MULTILINE)) == taken


@pytest.mark.parametrize("version", [None, "0.2.2"])
def test_without_its_release(
    version: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    assert main(["verify", "torchtitan:llama3_debugmodel"]) == 2
    err = capsys.readouterr().err
    assert 'give pip install "titanlite[torchtitan]"' in err
    assert ("is not installed" if version is None else "release 0.2.2 is installed") in err


@needs_torchtitan
def test_what_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_in():
        from torchtitan.models.common import attention
    monkeypatch.delattr(attention, "varlen_attn")
    said = r"torchtitan\.models\.common\.attention has no varlen_attn any more"
    with pytest.raises(MovedError, match=said), standing_in():
        pass


@pytest.mark.slow
@needs_torchtitan
def test_the_page_has_what_its_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/torchtitan.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("titanlite plan torch"))
    assert main(shlex.split(command)[1:]) == 0
    figures, _, _ = capsys.readouterr().out.partition("\n\n")
    assert figures in page
