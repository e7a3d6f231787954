"""SIGTERM and Ctrl-C on a run that saves: the step is finished and saved, and the run ends well."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train_script import (
    FOREVER,
    PATIENCE_SECONDS,
    TORCHRUN,
    assert_all_gone,
    command,
    environment,
    errors,
    free_port,
    losses,
    metrics,
    needs_proc,
    own_files,
    read_until,
    run,
    started,
)

from titanlite.ranks.signals import STOPPING, StopRequest
from titanlite.tools.convert.stored import find_checkpoint

SAVING = {
    "checkpoint__enable": True,
    "checkpoint__interval": 3,
    "checkpoint__last_save_model_only": False,
    "parallelism__data_parallel_shard_degree": 2,
}


def saved_step(folder: Path) -> int:
    return find_checkpoint(folder / "checkpoint")[1].step


@needs_proc
@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        # As `kill` does it, and as the terminal and scancel do.
        pytest.param(signal.SIGTERM, False, id="sigterm"),
        pytest.param(signal.SIGINT, True, id="ctrl-c", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, id="scancel", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_has_saved_its_last_step(tmp_path, number, to_group):
    words = command(tmp_path / "out", training__steps=FOREVER, **SAVING)
    with started(words, tmp_path / "tmp") as process:
        read_until(process, "checkpoint: step-3 saved")
        (os.killpg if to_group else os.kill)(process.pid, number)
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, errors(stderr)) == (0, "")
        assert stderr.endswith(f"starting 2 ranks ...\n{STOPPING} ...\n")
        assert stdout.endswith("stopped as requested; run the same command to resume\n")
        assert_all_gone(process.pid)
        assert own_files(tmp_path / "tmp") == []
    step = saved_step(tmp_path / "out")
    assert [row["step"] for row in metrics(tmp_path / "out")] == list(range(1, step + 1))
    assert step > 3


def test_the_second_request_ends_at_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("titanlite.ranks.signals.time.monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGTERM)
    heard = []
    monkeypatch.setattr("titanlite.ranks.signals.tell", lambda *words: heard.append(words[0]))
    with StopRequest() as stop:
        stop.on_request = lambda: heard.append(True)
        assert not stop.is_asked
        signal.raise_signal(signal.SIGTERM)
        # torchrun passes on what reached this process already.
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_asked
        assert heard == [STOPPING, True]
        now[0] += 1.5
        with pytest.raises(KeyboardInterrupt) as raised:
            signal.raise_signal(signal.SIGTERM)
        assert raised.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) == before
    # A rank that is not the first, and one whose launcher says it.
    for silent in (StopRequest(rank=1), StopRequest(StopRequest())):
        heard.clear()
        with silent:
            signal.raise_signal(signal.SIGTERM)
        assert (silent.is_asked, heard) == (True, [])
    with StopRequest(enabled=False) as stop, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_python_imports_shows_no_traceback(tmp_path):
    words = command(tmp_path / "out")
    with started([words[0], "-v", *words[1:]], tmp_path / "tmp") as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "import 'pydantic" in line:
                break
        process.send_signal(signal.SIGINT)
        said += process.stderr.readlines()
        process.wait(PATIENCE_SECONDS)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in said)


def agents(folder: Path, port: int, **changes: object) -> list[list[str]]:
    """The command lines of two machines, a rank each."""
    launcher = (
        *TORCHRUN,
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=one",
        "--local-addr=localhost",
    )
    return [command(folder, *launcher, **{**SAVING, **changes}) for _ in range(2)]


@needs_proc
@pytest.mark.slow
def test_two_agents_start_a_killed_rank_again_and_nothing_is_lost(tmp_path):
    assert run(command(tmp_path / "whole", training__steps=12, **SAVING)).returncode == 0
    port = free_port()
    processes = [
        subprocess.Popen(
            words,
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in agents(tmp_path / "out", port, training__steps=12)
    ]
    try:
        import contextlib
        import threading

        texts: dict[int, list[str]] = {0: [], 1: []}

        def follow(index: int) -> None:
            stdout = processes[index].stdout
            assert stdout is not None
            for line in stdout:
                texts[index].append(line)
                if "checkpoint: step-6 saved" in line and not any(
                    "resuming from" in said for said in texts[index]
                ):
                    for child in children(processes[index].pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(child, signal.SIGKILL)

        threads = [threading.Thread(target=follow, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for process, thread in zip(processes, threads, strict=True):
            process.wait(PATIENCE_SECONDS)
            thread.join()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0]
    said = "".join(texts[0] + texts[1])
    assert "checkpoint: resuming from step-6, saved with dp_shard 2" in said
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(word) for word in path.read_text().split()]


@needs_proc
@pytest.mark.slow
def test_torchrun_that_is_asked_to_stop_leaves_a_checkpoint(tmp_path):
    words = command(
        tmp_path / "out",
        *TORCHRUN,
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        training__steps=FOREVER,
        **SAVING,
    )
    with started(words, tmp_path / "tmp") as process:
        read_until(process, "checkpoint: step-3 saved")
        os.kill(process.pid, signal.SIGTERM)
        stdout, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert "stopped as requested" in stdout
        assert_all_gone(process.pid)
    assert saved_step(tmp_path / "out") == len(metrics(tmp_path / "out"))


# What SLURM's own commands do for docs/slurm.sh, with two nodes that are this machine.
SCONTROL = """\
#!/bin/sh
case "$1" in
    show) printf 'localhost\\nlocalhost\\n' ;;
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""
SRUN = """\
#!{python}
import signal, subprocess, sys

nodes = [subprocess.Popen(sys.argv[1:]) for _ in range(2)]
signal.signal(signal.SIGTERM, lambda *_: [node.terminate() for node in nodes])
sys.exit(max(abs(node.wait()) for node in nodes))
"""


@needs_proc
@pytest.mark.slow
def test_the_slurm_script_saves_before_its_time_is_up_and_goes_on(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN.format(python=sys.executable)}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    changes = {
        "job__config_file": "configs/tp2_fsdp2.toml",
        "model__zero_init_output": False,
        "training__steps": 40,
        "lr_scheduler__warmup_steps": 2,
        "validation__enable": False,
        "checkpoint__interval": 3,
        "checkpoint__last_save_model_only": False,
    }
    assert run(command(tmp_path / "whole", **changes)).returncode == 0
    requeued = tmp_path / "requeued"
    for name, value in {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "REQUEUED": str(requeued),
        "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 170),
    }.items():
        monkeypatch.setenv(name, value)
    options = [
        word for word in command(tmp_path / "out", **changes)[2:] if "config_file" not in word
    ]
    script = ["bash", "docs/slurm.sh", "configs/tp2_fsdp2.toml", *options]
    with started(script, tmp_path / "tmp") as process:
        read_until(process, "checkpoint: step-3 saved")
        (srun,) = children(process.pid)
        os.kill(srun, signal.SIGTERM)
        stdout, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert "stopped as requested" in stdout
        assert process.returncode != 0
        assert_all_gone(process.pid)
    assert requeued.read_text() == "77\n"
    again = run(script)
    assert again.returncode == 0, again.stderr
    assert "checkpoint: resuming from step-" in again.stdout
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
