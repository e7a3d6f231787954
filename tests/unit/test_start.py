"""What keeps a job from starting is found before any rank does: too many ranks, no such backend."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import JobConfig, checks, load_config, read_job
from titanlite.config.pipeline import PipelinePlan, make_pipeline_plan
from titanlite.errors import ConfigError
from titanlite.lab.cluster import VirtualCluster
from titanlite.lab.mesh import Mesh
from titanlite.ranks import machine
from titanlite.ranks.launch import Place, Ranks, run_ranks
from titanlite.start import BACKENDS, check_start
from titanlite.verify.command import main as verify

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def two_cores_and_eight_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 * 10**9)


def job(*argv: str) -> JobConfig:
    return load_config(["--job.device=cpu", *argv])


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
        (lambda: run_ranks(lambda place: None, 52), "ranks"),
        (lambda: Ranks(lambda place, connection: None, 52), "ranks"),
        (lambda: run_ranks(lambda place: None, 3, max_ranks=2), "ranks"),
        (lambda: VirtualCluster(Mesh(x=8, y=8)).run(lambda device: None), "ranks"),
        (lambda: verify(["--matrix", "--ranks=64"]), "--ranks"),
    ],
    ids=["run_ranks", "Ranks", "max_ranks", "lab", "matrix"],
)
def test_all_that_starts_ranks_has_the_same_limit(start: Callable[[], object], key: str) -> None:
    (line,) = problems_of(start)
    assert line.startswith(f"{key}: ")
    assert "ranks are too many for this machine" in line


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
        "--compile.enable",
        "--compile.backend=eagr",
        "--parallelism.data_parallel_shard_degree=512",
    )
    assert [line.partition(":")[0] for line in problems_of(lambda: check_start(many))] == [
        "parallelism.data_parallel_shard_degree",
        "compile.backend",
    ]


def test_a_known_backend_is_checked_without_torch() -> None:
    script = (
        "import sys\n"
        "from titanlite.config import load_config\n"
        "from titanlite.start import check_start\n"
        "words = ['--job.device=cpu', '--compile.enable', '--compile.backend=aot_eager']\n"
        "check_start(load_config(words))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_job_is_resolved_once_and_travels_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PipelinePlan] = []

    def count(*arguments: Any) -> PipelinePlan:
        made.append(make_pipeline_plan(*arguments))
        return made[-1]

    monkeypatch.setattr(checks, "make_pipeline_plan", count)
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
