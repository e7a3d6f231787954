"""A thread reads the next step's samples while a step runs; the run is the same, and ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import titanlite
from titanlite.errors import ConfigError

OWN = "MainThread"
READER = "reading ahead_0"


class Watched:
    """Random tokens; notes the thread that read each sample."""

    num_samples = None
    threads: dict[int, str] = {}  # noqa: RUF012 (a test reads it of the class)
    draws, bad = False, -1

    def __init__(self, *, seq_len: int, split: str, **_: Any) -> None:
        self.seq_len = seq_len

    def sample(self, index: int) -> Tensor:
        self.threads[index] = threading.current_thread().name
        if index == self.bad:
            raise ValueError("the file is gone")
        generator = None if self.draws else torch.Generator().manual_seed(index)
        return torch.randint(32, (self.seq_len,), generator=generator)


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "threads", {})
    titanlite.register_dataset("watched", Watched, vocab_size=32)


def run(folder: Path, steps: int = 6, *, is_ahead: bool = True, **options: Any) -> Any:
    sizes = {"flavor": "tiny", "dim": 16, "n_layers": 1, "n_heads": 4, "vocab_size": 32}
    training = {"dataset": "watched", "seq_len": 8, "local_batch_size": 1, "global_batch_size": 1}
    job = {
        "job": {"dump_folder": str(folder)},
        "model": {"name": "llama3", **sizes},
        "training": {**training, "steps": steps, "prefetch": is_ahead},
        "sampling": {"num_samples": 0},
        "checkpoint": {"enable": True, "interval": 3, "last_save_model_only": False},
    }
    try:
        return titanlite.train(job, **options)
    finally:
        assert READER not in {thread.name for thread in threading.enumerate()}


def test_all_but_the_first_step_are_read_ahead(tmp_path: Path) -> None:
    ahead = run(tmp_path / "ahead").losses
    assert [Watched.threads[index] for index in range(6)] == [OWN] + [READER] * 5
    assert 6 not in Watched.threads
    Watched.threads.clear()
    assert run(tmp_path / "not", is_ahead=False).losses == ahead
    assert set(Watched.threads.values()) == {OWN}
    # A run that resumes reads what the first would have read next.
    for last, read in ((3, {1, 2}), (6, {3, 4, 5})):
        Watched.threads.clear()  # a build reads sample 0
        run(tmp_path / "resumed", last)
        assert set(Watched.threads) - {0} == read


def test_a_data_set_that_draws_is_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "draws", True)
    ahead = run(tmp_path / "ahead").losses
    assert set(Watched.threads.values()) == {OWN}
    assert run(tmp_path / "not", is_ahead=False).losses == ahead


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_sample_that_fails_is_told_in_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    monkeypatch.setattr(Watched, "bad", 4)
    done: list[int] = []
    with pytest.raises(ConfigError) as raised:
        run(tmp_path, is_ahead=is_ahead, on_step=lambda event: done.append(event.step))
    (line,) = raised.value.problems
    assert line.startswith("training.dataset: sample(4) of Watched raises ValueError: the file is ")
    assert done == [1, 2, 3, 4]


def test_a_run_that_is_interrupted_ends_its_thread(tmp_path: Path) -> None:
    def interrupt(event: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_step=interrupt)
