"""Profiler traces: which steps, which files, and what is said where there is nothing to record."""

import json
from pathlib import Path

import pytest
import torch

from titanlite.config.schema import Profiling
from titanlite.observe.profiling import profile_steps, snapshot_memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OFF, SNAPSHOTS = Profiling(), Profiling(enable_memory_snapshot=True, profile_freq=2)
TRACES = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1)


def traces(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json"))


@pytest.mark.parametrize(("first_step", "expected"), [(1, [4, 8]), (101, [104, 108])])
def test_each_cycle_leaves_a_trace_of_its_active_steps(
    tmp_path: Path, first_step: int, expected: list[int]
) -> None:
    with profile_steps(TRACES, tmp_path, 2, CPU, first_step) as after_step:
        for step in range(first_step, first_step + 9):
            with torch.profiler.record_function(f"training step {step}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            after_step()
    written = traces(tmp_path)
    assert written == [f"profile_traces/iteration_{last}/rank2_trace.json" for last in expected]
    events = json.loads((tmp_path / written[0]).read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::mm" in names
    assert {n for n in names if str(n).startswith("training step")} == {
        f"training step {first_step + 3}"
    }


@pytest.mark.parametrize("num_steps", [0, 2, 3, 5, 6, 7])
def test_a_cycle_cut_short_leaves_no_file(tmp_path: Path, num_steps: int) -> None:
    section = TRACES.model_copy(update={"profiler_active": 2})

    def run_and_interrupt() -> None:
        with profile_steps(section, tmp_path, 0, CPU) as after_step:
            for _ in range(num_steps):
                after_step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_and_interrupt()
    assert len(traces(tmp_path)) == num_steps // 4


def test_off_it_does_nothing(tmp_path: Path) -> None:
    with profile_steps(OFF, tmp_path, 0, CPU) as after_step:
        after_step()
    assert not list(tmp_path.iterdir())


def test_memory_snapshots_on_cpu_are_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    with snapshot_memory(SNAPSHOTS, tmp_path, 0, CPU, on_note=notes.append) as after_step:
        after_step()
    assert notes == [
        "profiling.enable_memory_snapshot: memory is only recorded on CUDA; "
        "the run goes on without snapshots"
    ]
    with snapshot_memory(OFF, tmp_path, 0, CPU, on_note=notes.append) as after_step:
        after_step()
    assert len(notes) == 1
    assert not list(tmp_path.iterdir())


def test_memory_snapshots_follow_the_steps_and_an_end_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history: list[object] = []
    monkeypatch.setattr(
        "torch.cuda.memory._record_memory_history",
        lambda enabled="all", max_entries=0: history.append(enabled),
    )
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", lambda path: Path(path).touch())

    def run_out_of_memory() -> None:
        with snapshot_memory(SNAPSHOTS, tmp_path, 1, CUDA, 11) as after_step:
            for _ in range(5):
                after_step()
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pickle")) == [
        f"memory_snapshot/iteration_{name}/rank1_memory_snapshot.pickle"
        for name in ("12", "14", "15_exit")
    ]
    assert history == ["all", None]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory history is CUDA's")
def test_memory_snapshots_on_cuda_are_files(tmp_path: Path) -> None:
    with snapshot_memory(SNAPSHOTS, tmp_path, 3, CUDA) as after_step:
        for _ in range(5):
            torch.ones(1024, device="cuda")
            after_step()
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.pickle")) == [
        "memory_snapshot/iteration_2/rank3_memory_snapshot.pickle",
        "memory_snapshot/iteration_4/rank3_memory_snapshot.pickle",
    ]
    assert not (tmp_path / "memory_snapshot" / "iteration_4_exit").exists()
