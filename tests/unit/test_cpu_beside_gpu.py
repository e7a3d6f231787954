"""A job on the CPU of a machine that has GPUs opens no CUDA context: each takes memory of a GPU."""

from pathlib import Path

import pytest
import torch

import titanlite
from titanlite.ranks import launch
from titanlite.ranks.launch import count_gpus
from titanlite.training.initial_weights import _drawn, _init_parameter

pytestmark = pytest.mark.filterwarnings("default::UserWarning:torch")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs, on which whatever would open a context fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this opens a CUDA context")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ("_lazy_init", "init", "synchronize", "current_stream", "current_device", "set_device")
    for name in (*names, "mem_get_info", "get_device_properties", "get_rng_state", "Stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    empty = torch.empty
    # torch keeps the functions that a device's context changes: the one below must not be kept.
    torch.utils._device._device_constructors()

    def without_pinning(*sizes: object, pin_memory: bool = False, **keys: object) -> torch.Tensor:
        return refuse() if pin_memory else empty(*sizes, **keys)  # type: ignore[call-overload,return-value]

    monkeypatch.setattr(torch, "empty", without_pinning)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch's own CUDA, without a driver, raises before a context is opened",
)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("mode", ["async_with_pinned_mem", "disabled"])
def test_a_cpu_job_with_offload_and_saves_opens_no_context(tmp_path: Path, mode: str) -> None:
    done = titanlite.train(
        {
            "job": {"dump_folder": str(tmp_path), "device": "cpu"},
            "model": {"flavor": "debug"},
            "training": {
                "dataset": "synthetic",
                "local_batch_size": 2,
                "global_batch_size": 4,
                "steps": 2,
                "enable_cpu_offload": True,
            },
            "parallelism": {"data_parallel_shard_degree": 1},
            "activation_checkpoint": {"mode": "full"},
            "checkpoint": {"enable": True, "interval": 1, "async_mode": mode},
            "profiling": {
                "enable_profiling": mode == "disabled",
                "profile_freq": 2,
                "profiler_active": 1,
                "profiler_warmup": 1,
            },
            "sampling": {"num_samples": 0},
        }
    )
    assert len(done.losses) == 2
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-1", "step-2"}


def test_values_drawn_on_all_cores_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(f"{n}.weight", torch.Size((50 * n, 30))) for n in range(1, 9)]
    drawn = [list(_drawn(shapes, _init_parameter, 3, num_threads)) for num_threads in (1, 4)]
    monkeypatch.setattr("titanlite.training.initial_weights.MOST_DRAWN", 4 * 300 * 30)
    drawn.append(list(_drawn(shapes, _init_parameter, 3, 4)))
    for one, *others in zip(*drawn, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.usefixtures("gpus")
def test_the_gpus_are_counted_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.Path, "exists", lambda _: True)
    assert count_gpus() == 2


def test_nothing_asks_whether_the_machine_has_gpus_to_decide_what_a_job_does() -> None:
    """What a machine has says nothing of where a job runs: that is its device."""
    root = Path(titanlite.__file__).parent
    asking = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "cuda.is_available" in path.read_text()
    }
    # A mend of inductor that only GPUs need; and a job that is planned for a GPU.
    assert asking == {"parallelize/float8/torchao.py", "tools/planner/fake_world.py"}
