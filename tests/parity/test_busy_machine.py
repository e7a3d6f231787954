"""A run on a machine that is busy with other things: the watch is on, and nothing happens."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_train_script import command, errors, metrics, needs_proc, own_files, started
from training import train_on_rank

from titanlite.config.load import override
from titanlite.ranks.world import World
from titanlite.tools.verify.matrix import job_of, plans_of
from titanlite.tools.verify.pool import RankPool

pytestmark = [pytest.mark.alone, pytest.mark.slow]

NUM_RANKS, NUM_OTHERS = 8, 4
STEPS, LONGEST_SECONDS = 5000, 30 * 60


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Other processes that compute, all the time."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_OTHERS)
    ]
    yield
    for process in others:
        process.kill()
        process.wait()


@pytest.mark.timeout(LONGEST_SECONDS + 600)
@needs_proc
@pytest.mark.usefixtures("busy_machine")
def test_eight_ranks_on_a_busy_machine_train_for_half_an_hour(tmp_path: Path) -> None:
    words = command(
        tmp_path / "out",
        training__steps=STEPS,
        parallelism__data_parallel_shard_degree=4,
        parallelism__tensor_parallel_degree=2,
        # So that it ends well when it is asked to.
        checkpoint__enable=True,
        checkpoint__interval=STEPS,
    )
    with started(words, tmp_path / "tmp") as process:
        stop = threading.Timer(LONGEST_SECONDS, process.send_signal, [signal.SIGTERM])
        stop.start()
        try:
            stdout, stderr = process.communicate()
        finally:
            stop.cancel()
        assert (process.returncode, errors(stderr)) == (0, ""), stdout[-2000:]
        assert "The run has stopped" not in stdout
        assert own_files(tmp_path / "tmp") == []
    steps = [row["step"] for row in metrics(tmp_path / "out")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) == STEPS or "stopped as requested" in stdout
    print(f"{len(steps)} steps")


def look_often(_: World) -> None:
    """Make the watchdog look 200 times a second instead of twice."""
    from titanlite.ranks import watch

    watch.POLL_SECONDS = 0.005


@pytest.mark.timeout(1800)
def test_watching_harms_no_rank_that_compiles() -> None:
    with RankPool(4, timeout_seconds=180) as pool:
        for choice in plans_of(4, with_compile=True):
            if choice["compile"] == "on":
                pool.call(look_often)
                pool.call(train_on_rank, override(job_of(choice), {"training.steps": 1}))
