"""What simulations take: seconds that grow with the work, few CPU-seconds and bytes when large."""

import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from PIL import Image

from titanlite.tools.simulate import (
    ComputeAndWeightWorkers,
    Costs,
    Link,
    Network,
    OldestStageFirst,
    Simulation,
    Work,
    simulate,
)

ROOT = Path(__file__).parents[4]
EXACT = Costs(
    Fraction(1, 3),
    Fraction(2, 3),
    activation_units=1,
    network=Network(Link(Fraction(1, 10), Fraction(1, 7))),
)

# The resources of the command, in a process that starts nothing else.
MEASURE = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "titanlite", "simulate", *sys.argv[1:]], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


def gpipe(work: Work) -> ComputeAndWeightWorkers:
    return ComputeAndWeightWorkers(work.stage, work.stage)


def run(workers: int, batches: int, costs: Costs | None = None) -> Simulation:
    order = OldestStageFirst(workers, batches)
    return simulate(workers, workers, batches, gpipe, order, costs=costs)


def seconds(call: Callable[[], object]) -> float:
    """The least CPU time of several calls."""
    found = []
    for _ in range(5):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def test_time_grows_with_the_work_alone():
    small = seconds(lambda: run(16, 128).makespan)
    assert seconds(lambda: run(64, 128).makespan) < 4 * 2.5 * small


def test_exact_fractions_and_a_network_cost_little():
    plain = seconds(lambda: run(48, 96).makespan)
    thirds = Costs(Fraction(1, 3), Fraction(2, 3))
    assert seconds(lambda: run(48, 96, thirds).makespan) < 1.8 * plain
    assert seconds(lambda: run(48, 96, EXACT).makespan) < 4 * plain


def measure(*arguments: str) -> tuple[float, float, str]:
    """The CPU-seconds, the bytes of memory and the output of `titanlite simulate`."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    *output, figures = done.stdout.splitlines()
    used, most = figures.split()
    return float(used), float(most), "\n".join(output)


def test_png_of_thousands_of_cells_is_drawn_at_once(tmp_path):
    path = tmp_path / "gpipe.png"
    size = ("--workers", "64", "--batches", "128")
    used, _, _ = measure("GPipe", *size, "--quiet", "--png", str(path))
    assert used < 3
    with Image.open(path) as image:
        assert image.width > 3000


def test_quiet_command_takes_little_more_than_the_simulation():
    """It draws nothing, so it does not build a picture either."""
    size = ("--workers", "96", "--batches", "384")
    nothing, _, _ = measure("Pipeline", "--workers", "1", "--batches", "1", "--quiet")
    used, _, output = measure("Pipeline", *size, "--quiet")
    assert f"{(384 + 95) * 3} " in output
    simulation = seconds(lambda: run(96, 384).peak_activations)
    assert used - nothing < 4 * simulation


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "GPipe",
        "Pipeline --priority oldest-stage --forward 0.1 --backward 0.2",
        "Pipeline --forward 1/3 --backward 2/3 --latency 1/10 --time-per-unit 1/7 "
        "--activation-units 1",
    ],
    ids=["GPipe", "decimals", "fractions and a network"],
)
def test_a_thousand_workers_and_four_thousand_batches(arguments):
    """8.4 million work items: 20 CPU-seconds on a quiet machine, and 2 GB."""
    words = arguments.split()
    few, _, _ = measure(*words, "--workers", "256", "--batches", "1024", "--quiet")
    used, most, output = measure(*words, "--workers", "1024", "--batches", "4096", "--quiet")
    assert "1024" in output
    # Machines differ by a factor of three. 16 times the work takes 21 times as long: caches.
    assert used < 32 * few
    assert most < 2e9
