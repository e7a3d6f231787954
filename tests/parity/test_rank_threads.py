"""Jobs whose ranks are threads of one process: the same numbers, checkpoints and verdicts."""

import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pages import write_example
from plans import merged
from torch.nn.functional import cross_entropy

import titanlite
from titanlite import cli
from titanlite.config import JobConfig
from titanlite.errors import ConfigError, TitanliteError
from titanlite.observe.metrics import read_metrics
from titanlite.ranks import machine
from titanlite.ranks.launch import Place
from titanlite.tools.verify.verify import Verifier

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/ddp4.toml"
PAGE = (ROOT / "docs/threads.md").read_text(encoding="utf-8")
# The page's programs, by their first lines.
CODE = dict(re.findall(r"```python\n# (.*?)\n(.*?)```", PAGE, re.DOTALL))
TINY: dict[str, Any] = {
    "model": {"dim": 32, "num_layers": 2, "num_heads": 4},
    "training": {"steps": 4, "local_batch_size": 2, "global_batch_size": 8, "dtype": "float64"},
    "lr_scheduler": {"warmup_steps": 1},
    "sampling": {"num_samples": 0},
}
THREADS = {"comm": {"mode": "threads"}}
SLOW = pytest.mark.slow
PLANS = {
    "TP, FSDP": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
    "PP, CP": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
    "DDP": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
}


def train(folder: Path, plan: str, *more: dict[str, Any]) -> titanlite.callbacks.TrainResult:
    job = {"job": {"dump_folder": str(folder)}, "parallelism": PLANS[plan]}
    return titanlite.train(merged(TINY, job, *more))


@pytest.mark.parametrize(
    "plan", ["PP, CP", *(pytest.param(n, marks=SLOW) for n in ("DDP", "TP, FSDP"))]
)
def test_losses_are_those_of_processes(tmp_path: Path, plan: str) -> None:
    threads = train(tmp_path / "threads", plan, THREADS)
    processes = train(tmp_path / "processes", plan)
    assert len(threads.losses) == 4
    assert threads.losses == pytest.approx(processes.losses, rel=1e-13)
    assert threads.grad_norms == pytest.approx(processes.grad_norms, rel=1e-12)
    job = JobConfig.from_dict(merged(TINY, {"parallelism": PLANS[plan]}))
    measured = read_metrics(tmp_path / "threads")[-1].memory_bytes
    assert measured == pytest.approx(titanlite.plan(job).peak_bytes, rel=0.01)


def test_a_users_own_loss_takes_logits_that_are_sharded(tmp_path: Path) -> None:
    def summed(logits: Any, batch: Any) -> Any:
        return cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")

    titanlite.register_loss("summed", summed)
    own = train(tmp_path / "own", "TP, FSDP", THREADS, {"training": {"loss": "summed"}}).losses
    assert own == pytest.approx(train(tmp_path, "TP, FSDP", THREADS).losses, rel=1e-13)


def test_a_profiler_ends_the_count_of_memory(tmp_path: Path) -> None:
    def profile(event: titanlite.callbacks.Event) -> None:
        if event.step == 2 and dist.get_rank() == 1:
            with torch.profiler.profile() as profiler:
                torch.ones(3).exp()
            assert "aten::exp" in str(profiler.key_averages())

    job = {"job": {"dump_folder": str(tmp_path)}, "parallelism": PLANS["DDP"]}
    titanlite.train(merged(TINY, THREADS, job), on_step=profile)
    first, *_, last = read_metrics(tmp_path)
    assert first.memory_bytes < 50e6 < last.memory_bytes  # that of the process, with all of torch


@pytest.mark.parametrize("first", [THREADS, pytest.param({}, marks=SLOW)], ids=str)
def test_a_run_resumes_in_the_other_world(tmp_path: Path, first: dict[str, Any]) -> None:
    saves = {"checkpoint": {"enable": True, "interval": 2, "last_save_model_only": False}}
    whole = train(tmp_path / "whole", "TP, FSDP")
    half = {"training": {"steps": 2}, "lr_scheduler": {"total_steps": 4}}
    train(tmp_path, "TP, FSDP", saves, half, first)
    second = {} if first else THREADS
    rest = train(tmp_path, "TP, FSDP", saves, {"lr_scheduler": {"total_steps": 4}}, second)
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)


@pytest.mark.slow
def test_a_bug_on_one_rank_has_the_same_cause(breaks_rank_3: Callable[[], Any]) -> None:
    job = JobConfig.from_dict(merged(TINY, {"parallelism": PLANS["TP, FSDP"]}))
    found = {}
    for threads in (True, False):
        with Verifier(timeout_seconds=100, threads=threads) as verifier:
            found[threads] = verifier.verify(job, steps=2, patch=breaks_rank_3)
        assert not found[threads].agrees
    assert found[True].findings == found[False].findings


@pytest.fixture
def breaks_rank_3() -> Callable[[], Any]:
    """A bug of one rank of four: its part of a product is too large."""

    def broken() -> Any:
        from unittest.mock import patch

        import torch.distributed as dist

        from titanlite.models.image_transformer.model import FeedForward

        forward = FeedForward.forward

        def of_rank(self: Any, x: Any) -> Any:
            out = forward(self, x)
            return 1.5 * out if dist.is_initialized() and dist.get_rank() == 3 else out

        return patch.object(FeedForward, "forward", of_rank)

    return broken


def test_what_threads_cannot_do_is_refused(tmp_path: Path) -> None:
    symmetric = {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True}
    with pytest.raises(ConfigError, match="symmetric memory needs a process for each rank"):
        train(tmp_path, "DDP", THREADS, {"job": {"device": "cuda"}, "parallelism": symmetric})
    with pytest.raises(ConfigError, match="enable_profiling: torch's profiler"):
        train(tmp_path, "DDP", THREADS, {"profiling": {"enable_profiling": True}})

    def profiled(place: Place) -> None:
        with titanlite.open_world(place), torch.profiler.profile():
            dist.barrier()

    with pytest.raises(TitanliteError, match="torch's profiler runs on rank 0"):
        titanlite.spawn(profiled, 2, threads=True)
    wide = {"parallelism": {"data_parallel_replicate_degree": 8192}}
    with pytest.raises(ConfigError, match="ranks that are threads"):
        train(tmp_path, "DDP", THREADS, wide, {"training": {"global_batch_size": 16384}})


def debug(folder: Path, at_rank_1: str, commands: str, *more: str) -> str:
    """What `titanlite debug` shows with the loss of docs/threads.md, which calls breakpoint()."""
    loss = CODE["stops.py"].replace("breakpoint()", at_rank_1)
    (folder / "stops.py").write_text(f"import torch\n{loss}")
    options = ("--experimental.custom_import=stops", "--training.loss=stops", "--training.steps=1")
    keys = (*options, "--job.device=cpu", f"--job.dump_folder={folder / 'run'}", *more)
    command = [sys.executable, "-m", "titanlite", "debug", str(CONFIG), *keys]
    done = subprocess.run(
        command,
        input=commands,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stdout + done.stderr


def test_the_debugger_opens_at_a_breakpoint_of_one_rank(tmp_path: Path) -> None:
    shown = debug(tmp_path, "breakpoint()", "p outputs.shape\nothers\nq\n", "--rank=1")
    assert "(rank 1) torch.Size([" in shown
    assert "rank 0 (dp_replicate 0) is waiting" in shown or "rank 0 (dp_replicate 0) is" in shown
    assert "rank 1 (dp_replicate 1) is at stops.py" in shown
    assert shown.rstrip().endswith("stopped in the debugger")


def test_the_debugger_of_a_rank_opens_where_it_waits_for_one_that_failed(tmp_path: Path) -> None:
    shown = debug(tmp_path, "raise ValueError('broken')", "w\nothers\nq\n", "--rank=0")
    assert re.search(
        r"rank 1 has failed with \w+: .*ValueError: broken .*\nrank 0 was waiting here:", shown
    )
    assert "ddp/apply.py" in shown
    assert "rank 0 (dp_replicate 0) is waiting for rank 1 in" in shown
    assert "rank 1 (dp_replicate 1) has failed with" in shown


@pytest.mark.slow
def test_the_debugger_opens_where_no_rank_can_go_on(tmp_path: Path) -> None:
    """A collective of one rank in a loss, which is tried before the ranks need each other."""
    shown = debug(tmp_path, "dist.all_reduce(torch.ones(3))", "p outputs.dim()\nothers\nq\n")
    assert re.search(
        r"no rank can go on; rank 1: .* called all_reduce of 3 float32 at stops", shown
    )
    assert "-> dist.all_reduce(torch.ones(3))" in shown
    assert "(rank 1) 3" in shown
    assert "rank 0 (dp_replicate 0) is waiting in all_reduce" in shown


def test_the_page_shows_what_the_debugger_shows(tmp_path: Path) -> None:
    """docs/threads.md: a plan of the model of own_model.md that cuts `down` by columns."""
    write_example("vit", "own_model.md", tmp_path)
    plan = tmp_path / "vit.py"
    text = plan.read_text().replace('"v", "up")', '"v", "up", "down")')
    plan.write_text(text.replace('("o", "down")', '("o",)'))
    shown = re.findall(r"```\n\$ titanlite (debug vit.toml .*?)\n\.\.\.\n(.*?)```", PAGE, re.DOTALL)
    ((command, screen),) = shown
    typed = re.findall(r"\(rank 0\) (.*)\n", screen)
    done = subprocess.run(
        [sys.executable, "-m", "titanlite", *command.split(), "--job.device=cpu"],
        input="\n".join([*typed, "q"]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    # What is typed is not in the output of a program that is not a terminal.
    lines = [line.removeprefix("(rank 0) ") for line in done.stdout.splitlines()]
    for line in screen.splitlines():
        if line.removeprefix("(rank 0) ") not in typed:
            assert line.removeprefix("> ") in [one.removeprefix(f"> {tmp_path}/") for one in lines]
    assert "blocks.0.down (tensor-parallel plan: " in done.stderr


def test_the_notebook_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = CODE["a notebook"]
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == code.rstrip().rpartition("# ")[2]


def test_a_rank_error_has_the_frames_of_its_rank() -> None:
    def fails(place: Place) -> None:
        with titanlite.open_world(place):
            raise ValueError("broken")

    with pytest.raises(titanlite.RankError) as caught:
        titanlite.spawn(fails, 2, threads=True)
    assert isinstance(caught.value.__cause__, ValueError)
    assert traceback.extract_tb(caught.value.__cause__.__traceback__)[-1].name == "fails"


def test_verify_takes_threads_where_processes_are_too_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [str(CONFIG), "--shrink", "--steps=1", "--validation.enable=false"]
    monkeypatch.setattr(machine, "MOST_RANKS_A_CORE", 0)
    assert cli.main(["verify", *job]) == 0
    assert "dp_replicate 4, 4 ranks as threads: " in capsys.readouterr().out
    assert cli.main(["verify", *job, "--processes"]) == 2
    assert "4 ranks are too many for this machine: its limit is 1" in capsys.readouterr().err
    assert cli.main(["verify", *job, "--processes", "--threads"]) == 2
    assert "--threads: and --processes are two worlds" in capsys.readouterr().err
