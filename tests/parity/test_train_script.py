"""train.py as a user meets it: started as a process of its own, by itself or by torchrun."""

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import titanlite
import train
from titanlite.config import parse_args, resolve_job
from titanlite.ranks.launch import spawn
from titanlite.run import train_on_rank

ROOT = Path(__file__).resolve().parents[2]
TITANLITE = (sys.executable, "-m", "titanlite", "train")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
BY_TORCHRUN = (
    *TORCHRUN,
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
)
# How long a process may take, on a machine that is busy with other things too.
PATIENCE_SECONDS = 240
FOREVER = 100_000
SMALL = {
    "model.flavor": "debug",
    "training.steps": 3,
    "training.global_batch_size": 8,
    "training.local_batch_size": 2,
    "activation_checkpoint.mode": "none",
    "sampling.num_samples": 0,
}


def command(folder: Path, *launcher: str, **changes: object) -> list[str]:
    """The command line that trains a small model; `section__key=value` for section.key."""
    file = Path(f"{folder}.toml")
    file.write_text("")
    options = {key.replace("__", "."): value for key, value in changes.items()}
    options = {"job.config_file": file, **SMALL, "job.dump_folder": folder, **options}
    words = [
        f"--{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in options.items()
    ]
    program = launcher or (sys.executable,)
    script = () if program[-1] == "train" else (str(ROOT / "train.py"),)
    return [*program, *script, *words]


def status_of(folder: Path, **changes: object) -> int:
    """The exit status of that command in this process."""
    return train.main(command(folder, **changes)[2:], train.tools())


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as found:
        return int(found.getsockname()[1])


def environment(**extra: str) -> dict[str, str]:
    # Started from inside torchrun, these tests must not think that they are ranks.
    inherited = {k: v for k, v in os.environ.items() if "RANK" not in k and "WORLD_SIZE" not in k}
    return {**inherited, "PYTHONWARNINGS": "", **extra}


def errors(stderr: str) -> str:
    """What a process has said on stderr, but what it says of what runs."""
    return "".join(line for line in stderr.splitlines(True) if not line.endswith(" ...\n"))


def run(words: Sequence[str], **extra: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    done.stderr = errors(done.stderr)
    return done


@contextlib.contextmanager
def started(words: Sequence[str], temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own, whose temporary files go to `temporary`."""
    temporary.mkdir()
    # It would inherit that Ctrl-C is ignored, as it is where a shell runs these tests behind it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"ended without {text!r}: {process.stderr.read() if process.stderr else ''}")


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder)]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def processes_of(session: int | None) -> dict[int, int]:
    """Process -> parent, of those of the session that still run (a zombie does not).

    Of all sessions where it is None.
    """
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                state, parent, _, of_session = fields[:4]
                if session in (None, int(of_session)) and state not in "ZX":
                    parents[int(path.name)] = int(parent)
    return parents


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that are ranks: children of the run's fork server."""
    parents = processes_of(process.pid)
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == process.pid)


def assert_all_gone(session: int) -> None:
    """No process of the session is left, soon."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while processes_of(session):
        assert time.monotonic() < deadline, "processes are left behind"


def own_files(temporary: Path) -> list[str]:
    return [path.name for path in temporary.iterdir() if path.name.startswith("titanlite-")]


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def test_one_process_writes_figures_and_pictures(tmp_path):
    done = run(
        command(
            tmp_path,
            validation__enable=True,
            validation__steps=1,
            sampling__num_samples=3,
            metrics__enable_tensorboard=True,
            metrics__verbose=True,
            job__save_config_file="job.toml",
        )
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["loss"] == pytest.approx(math.log(17), rel=1e-6)
    always = {"step", "loss", "grad_norm", "lr", "tokens_per_second", "seconds", "memory_bytes"}
    assert all(always <= row.keys() for row in rows)
    assert ["validation_loss" in row for row in rows] == [False, False, True]
    bits = rows[-1]["validation_loss"] / math.log(2)
    assert rows[-1]["bits_per_dim"] == pytest.approx(bits)
    assert png_size(tmp_path / "loss.png") == (1152, 720)
    width, height = png_size(tmp_path / "samples.png")
    assert 400 < width < 1000
    assert 200 < height < 1000
    assert "\nmesh: 1 rank, nothing is split\n" in done.stdout
    first_screen = (tmp_path / "first_screen.txt").read_text()
    assert "  device         cpu, 1 rank with gloo" in first_screen
    assert first_screen.isascii()
    assert first_screen in done.stdout
    assert "sampling 3 images, 64 pixels each" in done.stdout
    assert len(list(tmp_path.glob("tb/*/events.out.tfevents.*"))) == 1
    saved = parse_args([f"--job.config_file={tmp_path / 'job.toml'}"])
    assert saved.training.global_batch_size == 8
    assert saved.job.dump_folder == str(tmp_path)


def test_every_way_to_start_gives_the_same_losses(tmp_path):
    two_by_two = {
        "parallelism__tensor_parallel_degree": 2,
        "parallelism__data_parallel_shard_degree": 2,
    }
    starts = {
        "self": command(tmp_path / "self", **two_by_two),
        "one": command(tmp_path / "one", *TORCHRUN, **two_by_two),
        "tp4": command(
            tmp_path / "tp4",
            *TITANLITE,
            parallelism__tensor_parallel_degree=4,
            parallelism__data_parallel_shard_degree=1,
        ),
        "torchrun": command(
            tmp_path / "torchrun",
            *BY_TORCHRUN,
            *TITANLITE[1:],
            parallelism__tensor_parallel_degree=2,
            profiling__enable_profiling=True,
            profiling__profile_freq=2,
            profiling__profiler_warmup=1,
        ),
    }
    temporary = {name: tmp_path / f"{name}-tmp" for name in starts}
    # Too long for the path of a socket, and PyTorch would take what follows ? for a URL's query.
    temporary["self"] = tmp_path / f"a #b?{'x' * 100}"
    # All at once: a run must not disturb another one.
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(started(words, temporary[name]))
            for name, words in starts.items()
        }
        outputs = {
            name: process.communicate(timeout=PATIENCE_SECONDS)
            for name, process in processes.items()
        }
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(
        starts, 0
    ), outputs
    for name in starts:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "self"), rel=1e-5)
        assert outputs[name][0].count("step 3/3") == 1, "one rank alone prints"
        assert own_files(temporary[name]) == []
    assert [errors(outputs[name][1]) for name in ("self", "one", "tp4")] == [""] * 3
    assert "USDT" not in outputs["torchrun"][1]
    traces = sorted(path.name for path in (tmp_path / "torchrun").glob("profile_traces/*/*"))
    assert traces == ["rank0_trace.json", "rank1_trace.json"]


def test_a_world_that_does_not_fit_the_plan_is_refused_once(tmp_path):
    words = command(tmp_path, *BY_TORCHRUN, parallelism__tensor_parallel_degree=4)
    done = run(words)
    assert done.returncode != 0
    line = (
        "parallelism.tensor_parallel_degree: tp 4 needs a multiple of 4 ranks, but there are 2; "
        "give 2, or start 4 ranks"
    )
    assert done.stderr.count(line) == 1
    assert done.stdout == ""
    for rank, said in ((0, line + "\n"), (1, "")):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        own = run(
            words[:1] + words[words.index(str(ROOT / "train.py")) :], LOCAL_RANK=str(rank), **place
        )
        assert (own.returncode, own.stderr, own.stdout) == (2, said, "")


@pytest.mark.parametrize("words", [(), ("--training.steps=3", "--model.flavor=debug")])
def test_without_a_file_nothing_is_trained(words, capsys):
    assert train.main(words, train.tools()) == 2
    said = "no file is given; run python train.py --job.config_file=configs/tp2_fsdp2.toml"
    assert capsys.readouterr() == ("", f"job.config_file: {said}\n")


def test_a_mistake_is_one_line_before_torch_is_imported(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("[training]\nsteps = -1\n")
    code = (
        "import sys, train\n"
        f"status = train.main(['--job.config_file={file}'], train.tools())\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(status)"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "training.steps: -1 is out of range; give an integer of at least 1\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job__dump_folder": "{file}"}, 'job.dump_folder: "{file}" cannot be created'),
        ({"job__dump_folder": "/proc/here"}, "job.dump_folder: "),
        (
            {"compile__enable": True, "compile__backend": "x"},
            'compile.backend: there is no backend "x"',
        ),
        (
            {
                "model__flavor": "cifar",
                "training__dataset": "cifar10",
                "training__dataset_path": "{torn}",
                "parallelism__data_parallel_shard_degree": 2,
            },
            "training.dataset_path: {torn}/data_batch_1.bin is not a whole number",
        ),
    ],
)
def test_what_this_machine_cannot_do_is_one_line(tmp_path, changes, message, capsys):
    file, torn = tmp_path / "file", tmp_path / "torn"
    file.write_text("in the way")
    torn.mkdir()
    for number in range(1, 6):
        (torn / f"data_batch_{number}.bin").write_bytes(b"torn")
    places = {"{file}": str(file), "{torn}": str(torn)}

    def fill(value: object) -> object:
        for name, path in places.items():
            value = value.replace(name, path) if isinstance(value, str) else value
        return value

    given = {key: fill(value) for key, value in changes.items()}
    assert status_of(tmp_path / "out", **given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(fill(message)))


def test_compiling_without_a_compiler_is_one_line(tmp_path):
    words = command(tmp_path, compile__enable=True)
    done = run(words, PATH=str(tmp_path), CXX="")
    assert done.returncode == 2
    assert done.stderr.startswith('compile.backend: "inductor" needs a C++ compiler on CPU')


@needs_proc
@pytest.mark.parametrize(
    ("number", "to_group", "status", "said"),
    [
        (signal.SIGINT, True, 130, "stopped by SIGINT\n"),
        (signal.SIGTERM, False, 143, "stopped by SIGTERM\n"),
        pytest.param(signal.SIGKILL, False, -9, "", marks=pytest.mark.slow),
    ],
    ids=["ctrl-c", "sigterm", "sigkill"],
)
def test_a_stopped_run_leaves_nothing_behind(tmp_path, number, to_group, status, said):
    temporary = tmp_path / "tmp"
    words = command(
        tmp_path / "out", training__steps=FOREVER, parallelism__data_parallel_shard_degree=2
    )
    with started(words, temporary) as process:
        read_until(process, "step ")
        assert len(ranks_of(process)) == 2
        (os.killpg if to_group else os.kill)(process.pid, number)
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, errors(stderr)) == (status, said)
        assert_all_gone(process.pid)
        if number != signal.SIGKILL:
            assert own_files(temporary) == []


@needs_proc
def test_a_killed_rank_ends_the_run_with_its_number(tmp_path):
    temporary = tmp_path / "tmp"
    words = command(
        tmp_path / "out", training__steps=FOREVER, parallelism__data_parallel_shard_degree=2
    )
    with started(words, temporary) as process:
        read_until(process, "step ")
        # Forked in order, so their process ids are too.
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1
        first, *_, last = errors(stderr).splitlines()
        assert (first, last) == (
            "The run has stopped: a rank was lost.",
            "rank 1: was killed by SIGKILL",
        )
        assert "rank 0 (dp_shard 0) is waiting for rank 1 in " in stderr
        assert_all_gone(process.pid)
        assert own_files(temporary) == []


OWN_MODEL = {
    "experimental__custom_import": "plain_model",
    "model__name": "plain",
    "model__flavor": "small",
}


def write_model(folder: Path, part: str = "model", old: str = "", new: str = "") -> Path:
    """A copy of the folder plain_model, with other text in one of its files."""
    shutil.copytree(Path(__file__).parent / "plain_model", folder / "plain_model")
    path = folder / f"plain_model/{part}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules are imported here, on ranks, and by processes that are started."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_users_own_model_trains_and_draws(own_folder):
    write_model(own_folder)
    out = own_folder / "out"
    options = OWN_MODEL | {"sampling__num_samples": 2}
    assert status_of(out, **options) == 0
    alone = losses(out)
    assert (out / "samples.png").exists()
    assert status_of(out, **options, parallelism__data_parallel_shard_degree=2) == 0
    assert losses(out) == pytest.approx(alone, rel=1e-5)


EMBED = "        x = self.tok_emb(tokens)\n"
RANDOM = """\
        import random, numpy, torch
        x = F.dropout(self.tok_emb(tokens), 0.3)
        x = x + (random.random() + numpy.random.random()) * torch.randn_like(x)
"""


@pytest.mark.parametrize(
    ("num_ranks", "has_torchrun"),
    [(1, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2))],
)
def test_every_way_to_start_draws_the_same_random_numbers(own_folder, num_ranks, has_torchrun):
    """torchrun, ranks of the fork server and one process: losses are equal bit by bit."""
    write_model(own_folder, "model", EMBED, RANDOM)

    def start(name: str, *launcher: str) -> list[str]:
        return command(
            own_folder / name,
            *launcher,
            **OWN_MODEL,
            training__dataset="synthetic",
            parallelism__data_parallel_shard_degree=num_ranks,
            validation__enable=True,
            validation__freq=2,
            validation__steps=1,
        )

    def numbers(name: str) -> list[tuple[float | None, ...]]:
        kinds = ("loss", "grad_norm", "validation_loss")
        return [tuple(row.get(kind) for kind in kinds) for row in metrics(own_folder / name)]

    with contextlib.ExitStack() as stack:
        if has_torchrun:
            launcher = [*BY_TORCHRUN, f"--nproc-per-node={num_ranks}"]
            process = stack.enter_context(started(start("torchrun", *launcher), own_folder / "tmp"))
        job = resolve_job(parse_args(start("server")[2:]))
        spawn(train_on_rank, num_ranks, job, "cpu", timeout_seconds=PATIENCE_SECONDS)
        if has_torchrun:
            _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0, stderr
            assert numbers("torchrun") == numbers("server")
    if num_ranks == 1:
        titanlite.train(parse_args(start("one")[2:]))
        assert numbers("one") == numbers("server")


@pytest.mark.parametrize(
    ("part", "old", "new", "message"),
    [
        (
            "plan",
            'head=("output",)',
            'head=("outputs",)',
            "model.name: `head` of the plan of PlainModel names 'outputs', ",
        ),
        ("plan", "PLANS = {", "PLAN = {", "model.name: loading plain_model.plan:PLANS failed"),
        (
            "config",
            "@dataclass(frozen=True)\n",
            "",
            'model.name: "plain_model.config:PlainConfig", the configuration of "plain", is not a '
            "dataclass; ",
        ),
        (
            "model",
            "positions: Tensor) ->",
            "positions: Tensor, mask: Tensor) ->",
            "model.name: forward of PlainModel needs `mask`",
        ),
    ],
)
def test_a_users_own_model_that_lacks_something(own_folder, part, old, new, message, capsys):
    write_model(own_folder, part, old, new)
    assert status_of(own_folder / "out", **OWN_MODEL) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def children_of(process: int) -> list[int]:
    """torchrun gives each rank a session of its own."""
    return sorted(pid for pid, parent in processes_of(None).items() if parent == process)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [((), signal.SIGSTOP), (BY_TORCHRUN, signal.SIGSTOP), (BY_TORCHRUN, signal.SIGKILL)],
    ids=["own-stopped", "torchrun-stopped", "torchrun-killed"],
)
def test_a_stuck_or_dead_rank_ends_the_run_with_a_report(tmp_path, launcher, number):
    temporary = tmp_path / "tmp"
    words = command(
        tmp_path / "out",
        *launcher,
        training__steps=FOREVER,
        comm__train_timeout_seconds=2,
        parallelism__data_parallel_shard_degree=2,
    )
    with started(words, temporary) as process:
        read_until(process, f" 10/{FOREVER}")
        ranks = children_of(process.pid) if launcher else ranks_of(process)
        bad = ranks[1]
        os.kill(bad, number)
        start = time.monotonic()
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert time.monotonic() - start < 15, stderr
        assert process.returncode == 1
        if number == signal.SIGSTOP:
            reason = "ranks waited 2 s (comm.train_timeout_seconds)"
            state = "is stopped by a signal"
        else:
            reason, state = "a rank was lost", "has died"
        assert f"The run has stopped: {reason}.\n" in stderr
        assert "  rank 0 (dp_shard 0) is waiting for rank 1 in " in stderr
        assert f"rank 1: {state} (process {bad} on " in stderr
        assert stderr.count("The run has stopped") == 1
        assert_all_gone(process.pid)
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
        assert own_files(temporary) == []
    names = sorted(path.name for path in (tmp_path / "out" / "comm_traces").iterdir())
    assert names == ["rank_0", "rank_0.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "error", "is_traced"),
    [
        ((), "LookupError", True),
        (BY_TORCHRUN, "LookupError", True),
        (BY_TORCHRUN, "titanlite.errors.ConfigError", False),
    ],
    ids=["own", "torchrun", "torchrun-mistake"],
)
def test_an_error_of_one_rank_is_all_that_is_said(own_folder, launcher, error, is_traced):
    raises = (
        "        import torch, titanlite.errors\n"
        "        if torch.distributed.get_rank() == 1:\n"
        f"            raise {error}('no such table')\n"
    )
    write_model(own_folder, "model", EMBED, raises + EMBED)
    words = command(
        own_folder / "out", *launcher, **OWN_MODEL, parallelism__data_parallel_shard_degree=2
    )
    done = run(words)
    assert done.returncode == 1
    line = f"{error}: no such table" if is_traced else "no such table"
    # torchrun says "[rank1]: " before it; a launcher of our own gives it once more at the end.
    told = sum(said.endswith(line) for said in done.stderr.splitlines())
    assert told == (1 if launcher else 2)
    assert done.stderr.count("Traceback (most recent call last)") - bool(launcher) == is_traced
    assert "The run has stopped" not in done.stderr
    assert not (own_folder / "out" / "comm_traces").exists()


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True], ids=["whole", "killed"])
def test_a_world_without_an_agent(tmp_path, is_killed):
    words = command(
        tmp_path / "out",
        training__steps=FOREVER if is_killed else 3,
        comm__train_timeout_seconds=5,
        parallelism__data_parallel_shard_degree=2,
    )
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    world["MASTER_PORT"] = str(free_port())
    processes = [
        subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **world),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        if is_killed:
            read_until(processes[0], f" 10/{FOREVER}")
            processes[0].kill()
        said = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    if is_killed:
        assert [process.returncode for process in processes] == [-signal.SIGKILL, 1]
        assert "rank 1: lost the connection to rank 0, which hosts the store (" in said[1]
    else:
        assert [process.returncode for process in processes] == [0, 0]
        assert set(said[0].splitlines()) <= {"checking the job ...", "starting 2 ranks ..."}
        assert not said[1]
