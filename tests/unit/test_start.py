"""What keeps a job from starting is found before any rank does: too many ranks, no such backend."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanlite.cli import train as train_command
from titanlite.config import JobConfig, draft, parse_args, read_job, resolve_job
from titanlite.config.pipeline import PipelinePlan, make_pipeline_plan
from titanlite.errors import ConfigError
from titanlite.from_python import train
from titanlite.parallelize.compile.backends import BACKENDS
from titanlite.ranks import machine
from titanlite.ranks.launch import Place, Ranks, spawn
from titanlite.start import check_start, least_bytes
from titanlite.tools.lab.cluster import VirtualCluster
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.planner import local as planner
from titanlite.tools.planner.cache import load_pieces
from titanlite.tools.planner.compose import compose
from titanlite.tools.planner.local import PLAN_ERROR, planned_bytes
from titanlite.tools.verify.command import main as verify

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def two_cores_and_eight_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 * 10**9)
    monkeypatch.setattr(machine, "swap_bytes", lambda: 0)


def job(*argv: str) -> JobConfig:
    return parse_args(["--job.device=cpu", *argv])


def problems_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call()
    return list(caught.value.problems)


def test_ranks_are_as_many_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.most_local_ranks() == 51  # (8 GB - 230 MB) / 150 MB
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**12)
    assert machine.most_local_ranks() == 64
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**8)
    assert machine.most_local_ranks() == 1


def test_a_job_of_more_ranks_than_the_machine_takes_is_refused() -> None:
    config = job("--parallelism.data_parallel_shard_degree=4096")
    assert problems_of(lambda: check_start(config)) == [
        "parallelism.data_parallel_shard_degree: 4096 ranks are too many for this machine: its "
        "limit is 51 (32 per core on 2 cores, and 150 MB per rank in 8 GB); give at most 51, "
        "start them with torchrun on more machines, or set job.max_local_ranks = 4096"
    ]
    # torchrun has started these.
    place = Place(0, 4096, 0, 8, rendezvous="env://")
    assert check_start(config, place).job.dims.world_size == 4096
    allowed = job("--parallelism.data_parallel_shard_degree=4096", "--job.max_local_ranks=5000")
    assert check_start(allowed).job.dims.world_size == 4096
    fewer = job("--parallelism.data_parallel_shard_degree=4", "--job.max_local_ranks=2")
    (line,) = problems_of(lambda: check_start(fewer))
    assert "4 ranks are too many for this machine: job.max_local_ranks is 2; give" in line


@pytest.mark.parametrize(
    ("start", "key"),
    [
        (lambda: spawn(lambda place: None, 52), "ranks"),
        (lambda: Ranks(lambda place, connection: None, 52), "ranks"),
        (lambda: spawn(lambda place: None, 3, max_ranks=2), "ranks"),
        (lambda: VirtualCluster(Mesh(x=8, y=8)).run(lambda device: None), "ranks"),
        (lambda: verify(["--matrix", "--ranks=64", "--processes"]), "--ranks"),
    ],
    ids=["spawn", "Ranks", "max_ranks", "lab", "matrix"],
)
def test_all_that_starts_ranks_has_the_same_limit(start: Callable[[], object], key: str) -> None:
    (line,) = problems_of(start)
    assert line.startswith(f"{key}: ")
    assert "ranks are too many for this machine" in line


LLAMA = ("--model.name=llama3", "--training.dataset=synthetic", "--training.seq_len=64")


def test_a_job_that_cannot_fit_in_memory_is_refused() -> None:
    config = job(*LLAMA, "--model.flavor=8B")
    # 16 bytes for each of 8.03 billion parameters.
    assert problems_of(lambda: check_start(config, trains=True)) == [
        "model: parameters, gradients and optimizer state take at least 128 GB on CPU, and this "
        "machine has 8 GB; train a smaller model or batch, start ranks with torchrun on more "
        "machines, or set job.max_local_memory_gb = 129"
    ]
    # It is not about runs that do not train, nor about ranks on other machines.
    check_start(config)
    sharded = job(*LLAMA, "--model.flavor=8B", "--parallelism.data_parallel_shard_degree=2")
    check_start(sharded, Place(0, 2, 0, 1, rendezvous="env://"), trains=True)
    assert len(problems_of(lambda: check_start(sharded, trains=True))) == 1
    check_start(job(*LLAMA, "--model.flavor=8B", "--job.max_local_memory_gb=129"), trains=True)
    less = job(*LLAMA, "--model.flavor=8B", "--job.max_local_memory_gb=20")
    (line,) = problems_of(lambda: check_start(less, trains=True))
    assert "and job.max_local_memory_gb is 20;" in line


def test_the_weights_of_a_gpu_count_in_this_memory_if_they_are_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, stand_in in (
        ("count_gpus", lambda: 1),
        ("choose_device", lambda *_: "cuda"),
        ("check_machine", lambda *_: None),
    ):
        monkeypatch.setattr(f"titanlite.start.{name}", stand_in)

    def activations(_: object) -> int:
        pytest.fail("counts activations, which the GPU holds")

    monkeypatch.setattr(planner, "planned_bytes", activations)
    words = (*LLAMA, "--model.flavor=8B")
    check_start(job(*words), trains=True, planner=planner)
    (line,) = problems_of(
        lambda: check_start(
            job(*words, "--training.enable_cpu_offload=true"), trains=True, planner=planner
        )
    )
    assert "parameters, gradients and optimizer state take at least 128 GB on CPU" in line


def test_ranks_that_are_threads_share_a_gpu_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("start", "ranks.launch"):
        monkeypatch.setattr(f"titanlite.{module}.count_gpus", lambda: 1)
    wide = "--parallelism.data_parallel_shard_degree=2"
    for device, chosen in (("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")):
        start = check_start(job(wide, f"--job.device={device}"), threads=True)
        assert (start.device_type, start.threads) == (chosen, True)


def test_the_least_memory_is_that_of_each_replica_and_its_optimizer() -> None:
    def least(*argv: str) -> int:
        resolved = resolve_job(job(*argv), None)
        return least_bytes(resolved.config, resolved.model, resolved.dims)

    numel = resolve_job(job(), None).model.num_parameters
    assert least() == 16 * numel
    assert least("--training.dtype=bfloat16") == 8 * numel
    assert least("--optimizer.name=SGD") == 8 * numel
    assert least("--optimizer.name=SGD", "--optimizer.momentum=0.9") == 12 * numel
    assert least("--parallelism.data_parallel_shard_degree=4") == 16 * numel
    assert least("--parallelism.tensor_parallel_degree=4") == 16 * numel
    assert least("--parallelism.data_parallel_replicate_degree=3") == 48 * numel
    seed = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    assert least(*seed) == 4 * numel


def test_a_planned_job_that_cannot_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = job("--model.flavor=debug", "--training.dataset=synthetic")
    resolved = resolve_job(config, None)
    assert planned_bytes(resolved) == 0
    pieces = load_pieces(resolved)
    (composition,) = compose(resolved, pieces)
    by_plan = planned_bytes(resolved)
    assert by_plan == round((1 - PLAN_ERROR) * composition.peak().num_bytes)
    least = least_bytes(config, resolved.model, resolved.dims)
    assert least < by_plan
    monkeypatch.setattr(machine, "memory_bytes", lambda: (least + by_plan) // 2)
    with monkeypatch.context() as patch:
        patch.setattr("titanlite.start.LARGE_SHARE", 0.0)
        (line,) = problems_of(lambda: check_start(config, trains=True, planner=planner))
    assert line.startswith("training: by its plan, the ranks take at least ")
    # A job of which little is known to be needed is not looked up.
    monkeypatch.setattr(machine, "memory_bytes", lambda: 100 * least)
    monkeypatch.setattr(planner, "planned_bytes", lambda _: pytest.fail("looked up"))
    check_start(config, trains=True, planner=planner)


def test_memory_estimation_shows_memory_and_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.toml"
    file.write_text(
        '[model]\nflavor = "debug"\n[training]\ndataset = "synthetic"\n'
        "[memory_estimation]\nenable = true\n"
    )
    words = [str(file), "--parallelism.tensor_parallel_degree=2", "--job.max_local_ranks=1"]
    assert train_command(words) == 0
    shown = capsys.readouterr().out
    assert "2 ranks: tp 2" in shown
    assert "P parameters" in shown
    assert "nothing was trained" in shown
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ConfigError, match="true estimates memory and does not train"):
        train(str(file))
    assert train_command([*words, "--parallelism.tensor_parallel_degree=3"]) == 2
    assert "tensor_parallel_degree: 3 does not divide" in capsys.readouterr().err


def test_backends_known_by_name_are_those_of_torch() -> None:
    import torch._dynamo

    assert set(BACKENDS) <= set(torch._dynamo.list_backends(exclude_tags=()))


def test_a_backend_that_does_not_exist_is_refused_with_the_rest() -> None:
    config = job(
        "--compile.enable", "--compile.backend=eagr", "--parallelism.tensor_parallel_degree=4"
    )
    assert problems_of(lambda: check_start(config, Place(0, 4, 0, 4, rendezvous="env://"))) == [
        'compile.backend: there is no backend "eagr"; did you mean "eager"?'
    ]
    many = job(
        "--compile.enable", "--compile.backend=eagr", "--parallelism.data_parallel_shard_degree=512"
    )
    assert [line.partition(":")[0] for line in problems_of(lambda: check_start(many))] == [
        "parallelism.data_parallel_shard_degree",
        "compile.backend",
    ]


def test_a_known_backend_is_checked_without_torch() -> None:
    script = (
        "import sys\n"
        "from titanlite.config import parse_args\n"
        "from titanlite.start import check_start\n"
        "words = ['--job.device=cpu', '--compile.enable', '--compile.backend=aot_eager']\n"
        "check_start(parse_args(words))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_job_is_resolved_once_and_travels_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PipelinePlan] = []

    def count(*arguments: Any) -> PipelinePlan:
        made.append(make_pipeline_plan(*arguments))
        return made[-1]

    monkeypatch.setattr(draft, "make_pipeline_plan", count)
    argv = ["--job.device=cpu", f"--job.config_file={ROOT}/configs/pp2_fsdp2.toml"]
    job = check_start(read_job(argv)).job
    assert made == [job.pipeline]
    assert (job.dims.pp, job.seq_len, job.global_batch_size) == (2, 64, 32)
    there = pickle.loads(pickle.dumps(job))
    assert there == job
    assert len(made) == 1


def test_all_that_is_wrong_is_said_at_once() -> None:
    argv = [
        "--job.device=cpu",
        "--training.stpes=5",
        "--training.global_batch_size=12",
        "--parallelism.data_parallel_shard_degree=512",
        "--compile.enable",
        "--compile.backend=eagr",
    ]
    assert [
        line.partition(":")[0] for line in problems_of(lambda: check_start(read_job(argv)))
    ] == [
        "training.stpes",
        "training.global_batch_size",
        "parallelism.data_parallel_shard_degree",
        "compile.backend",
    ]
