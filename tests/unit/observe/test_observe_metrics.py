"""The metrics file and its writers: one JSON object a step, and figures that are right."""

import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from titanlite.errors import ConfigError
from titanlite.observe.metrics import (
    MetricsLog,
    StepRecord,
    mfu,
    peak_flops_per_second,
    peak_process_bytes,
    read_metrics,
)


def make_record(step: int, **changes: Any) -> StepRecord:
    figures = {
        "loss": 2.5 / step,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_second": 1000.0,
        "seconds": 0.25,
        "memory_bytes": 2**20,
        **changes,
    }
    return StepRecord(step=step, **figures)


def test_one_json_object_a_step_with_exactly_the_keys(tmp_path: Path) -> None:
    plain = ["step", "loss", "grad_norm", "lr", "tokens_per_second", "seconds", "memory_bytes"]
    with MetricsLog(tmp_path / "out") as log:
        log.log(make_record(1))
        # Flushed at once: a run that is killed now has this step.
        assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 1
        log.log(
            make_record(
                2, validation_loss=1.4, measures={"bits_per_dim": 2.02}, flops_per_second=3e9
            )
        )
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert list(rows[0]) == plain
    assert list(rows[1]) == [*plain, "validation_loss", "flops_per_second", "bits_per_dim"]
    assert rows[1]["loss"] == 1.25


def test_what_is_written_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    records = [
        make_record(i, loss=math.pi / i, mfu=0.1 * i, measures={"bits_per_byte": 0.7 * i})
        for i in range(1, 5)
    ]
    records.append(
        make_record(5, tokens_per_second=None, samples_per_second=3.0, validation_metrics={"x": 2})
    )
    with MetricsLog(tmp_path) as log:
        for record in records:
            log.log(record)
    assert read_metrics(tmp_path) == read_metrics(log.path) == records


def test_a_loss_that_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.log(make_record(1, loss=math.nan, grad_norm=math.inf))
    text = log.path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record.loss)
    assert math.isnan(record.grad_norm)


def steps_of(path: Path) -> list[int]:
    return [record.step for record in read_metrics(path)]


def write_steps(folder: Path, first: int, last: int, loss: float = 1.0) -> str:
    """A run of these steps; what it says of records that were there."""
    with MetricsLog(folder, first_step=first, pictures=["loss.png", "more.png"]) as log:
        said = [log.log(make_record(step, loss=loss)) for step in range(first, last + 1)]
    assert not any(said[1:])
    return said[0]


def test_a_new_run_starts_clean_a_resumed_one_goes_on_and_nothing_is_lost(tmp_path: Path) -> None:
    assert write_steps(tmp_path, 1, 5, loss=1.0) == ""
    (tmp_path / "loss.png").write_text("its curve")
    said = write_steps(tmp_path, 4, 6, loss=2.0)
    assert said == "metrics: the records of step 4 and later are kept in metrics.1.jsonl"
    assert [(r.step, r.loss) for r in read_metrics(tmp_path)] == [
        *((step, 1.0) for step in (1, 2, 3)),
        *((step, 2.0) for step in (4, 5, 6)),
    ]
    assert [(r.step, r.loss) for r in read_metrics(tmp_path / "metrics.1.jsonl")] == [
        (4, 1.0),
        (5, 1.0),
    ]
    assert write_steps(tmp_path, 7, 7) == ""
    said = write_steps(tmp_path, 1, 2, loss=3.0)
    kept = "metrics.2.jsonl, loss.2.png"
    assert said == f"metrics: the records of an earlier run are kept in {kept}"
    assert steps_of(tmp_path) == [1, 2]
    assert steps_of(tmp_path / "metrics.2.jsonl") == [1, 2, 3, 4, 5, 6, 7]
    assert (tmp_path / "loss.2.png").read_text() == "its curve"
    assert {path.name for path in tmp_path.iterdir()} == {
        "metrics.jsonl",
        *("metrics.1.jsonl", "metrics.2.jsonl", "loss.2.png"),
    }


def test_a_run_that_records_nothing_moves_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    with MetricsLog(tmp_path):
        pass
    assert steps_of(tmp_path) == [1, 2, 3]


def test_one_run_at_a_time_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.observe.metrics.PATIENCE_SECONDS", 0)
    write_steps(tmp_path, 1, 3)
    for first_step in (1, 3, 9):
        with MetricsLog(tmp_path, first_step=first_step) as log:
            # Before its first record, and after it has put another file in its place.
            for step in (first_step, first_step + 1):
                with pytest.raises(ConfigError, match=r"another run is writing to .*; end that"):
                    MetricsLog(tmp_path)
                log.log(make_record(step))
    assert steps_of(tmp_path) == [1, 2, 3, 4, 9, 10]


def test_a_file_replaced_while_it_was_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, 1, 3)
    asked: list[int] = []

    def replaced_meanwhile(descriptor: int, patience_seconds: float) -> bool:
        if not asked:
            (tmp_path / "other").write_bytes((tmp_path / "metrics.jsonl").read_bytes())
            (tmp_path / "other").replace(tmp_path / "metrics.jsonl")
        asked.append(descriptor)
        return True

    monkeypatch.setattr("titanlite.observe.metrics.hold", replaced_meanwhile)
    with MetricsLog(tmp_path, first_step=4) as log:
        log.log(make_record(4))
    assert len(asked) == 2
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.log(make_record(1))
        log.log(make_record(2))
    cut = log.path.read_text()[:-20]
    log.path.write_text(cut)
    assert steps_of(tmp_path) == [1]
    with MetricsLog(tmp_path, first_step=2) as log:
        log.log(make_record(2))
    assert steps_of(tmp_path) == [1, 2]
    assert (tmp_path / "metrics.1.jsonl").read_text() == cut.splitlines()[1]


ODD_LINES = (
    b"not json",
    b"[1, 2]",
    b"3",
    b"{}",
    b'{"step": -1}',
    b'{"step": "one", "loss": 1}',
    b"\xff\xfe",
    b"[" * 5000,
    b"[" * 50_000,
    b"1" * 5000,
)


def test_a_line_that_is_no_record_is_named_and_kept(tmp_path: Path) -> None:
    for number, line in enumerate(ODD_LINES):
        folder = tmp_path / str(number)
        write_steps(folder, 1, 2)
        (folder / "metrics.jsonl").write_bytes(
            line + b"\n" + (folder / "metrics.jsonl").read_bytes()
        )
        with pytest.raises(ConfigError, match=r"line 1 of .*metrics\.jsonl is not a record"):
            read_metrics(folder)
        write_steps(folder, 3, 3)
        assert steps_of(folder) == [1, 2, 3]
        assert (folder / "metrics.1.jsonl").read_bytes() == line + b"\n"


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="is a pipe or a device, not a file"):
        read_metrics(tmp_path)
    with pytest.raises(OSError, match="is a pipe or a device, not a file"):
        MetricsLog(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        read_metrics(tmp_path / "none")


@pytest.mark.filterwarnings("default")
def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, enable_tensorboard=True, save_tb_folder="events") as log:
        log.log(make_record(1))
        log.log(make_record(2, validation_loss=1.5))
    (folder,) = (tmp_path / "events").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5), (2, 1.25)]
    assert [(e.step, e.value) for e in events.Scalars("validation_loss")] == [(2, 1.5)]
    assert "step" not in events.Tags()["scalars"]


def test_wandb_gets_every_figure_and_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple] = []

    class Run:
        def log(self, figures: dict, step: int) -> None:
            calls.append(("log", figures, step))

        def finish(self) -> None:
            calls.append(("finish",))

    def init(**arguments: Any) -> Run:
        calls.append(("init", arguments))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with MetricsLog(tmp_path, enable_wandb=True, job_config={"training": {"steps": 3}}) as log:
        log.log(make_record(1))
    log.close()
    assert calls[0] == ("init", {"dir": str(tmp_path), "config": {"training": {"steps": 3}}})
    assert calls[1][2] == 1
    assert calls[1][1]["loss"] == 2.5
    assert calls[2:] == [("finish",)]


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, teraflops: float | None) -> None:
    assert peak_flops_per_second(name) == (None if teraflops is None else teraflops * 1e12)


def test_mfu_is_a_fraction_of_all_gpus_peak_and_none_where_unknown() -> None:
    assert mfu(989e12, "NVIDIA H100 80GB HBM3", 2) == pytest.approx(0.5)
    assert mfu(1e12, "cpu", 1) is None


def test_peak_memory_on_cpu_is_bytes_of_this_process() -> None:
    before = peak_process_bytes()
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    after = peak_process_bytes()
    # Between 10 MB and 64 GB only if the unit is right: a Python with torch takes a few 100 MB.
    assert 10e6 < before < 64e9
    assert after >= before
    assert after >= len(block)
