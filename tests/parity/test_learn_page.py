"""docs/learn.md on real processes: each number of its table, and what its commands say."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from titanlite.tools.learn.command import show_number
from titanlite.tools.learn.curves import PICTURES
from titanlite.tools.learn.topics import TOPICS, Runs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "learn.md").read_text()
# How far a measured time may be from the formula: a machine is never quite quiet.
TOLERANCES = {"dp": 0.3, "pp": 0.5, "roofline": 0.6}


@pytest.fixture(scope="module")
def numbers():
    runs = Runs(tuple(job for topic in TOPICS.values() for job in topic.jobs))
    found = {name: topic.run(runs) for name, topic in TOPICS.items()}
    runs.close()
    return found


def cells_of(name):
    row = next(line for line in PAGE.splitlines() if f"| `titanlite learn {name}` |" in line)
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def own_formula(name, found):
    """The roofline's row count for this machine, whose memory may be faster or slower beside its
    arithmetic than that of the CPU whose file the formula takes."""
    if name != "roofline":
        return found.formula

    def seconds(work):
        times = []
        for _ in range(8):
            start = time.thread_time()
            work()
            times.append(time.thread_time() - start)
        return min(times)

    weights, square = torch.randn(4096, 4096), torch.randn(1024, 1024)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    flops_per_second = 2 * 1024**3 / seconds(lambda: square @ square)
    bytes_per_second = weights.nbytes / seconds(weights.sum)
    torch.set_num_threads(threads)
    return 4 * flops_per_second / (2 * bytes_per_second)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", TOPICS)
def test_numbers_are_those_of_the_table(name, numbers):
    found = numbers[name]
    *_, formula, simulated, measured, _ = cells_of(name)
    assert formula == f"{show_number(found.formula)} {found.unit} ({found.of})"
    assert simulated == show_number(found.simulated)
    if name in TOLERANCES:
        assert found.simulated == pytest.approx(found.formula, rel=0.1)
        assert found.measured == pytest.approx(own_formula(name, found), rel=TOLERANCES[name])
    else:
        assert measured == show_number(found.measured)
        assert found.measured == pytest.approx(found.simulated, rel=1e-9)
        assert found.simulated == pytest.approx(found.formula, rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero", "recomputation"])
def test_planned_picture_is_that_of_the_page(name):
    shown = ROOT / "docs" / "images" / "learn" / f"{name}.svg"
    # Other versions of matplotlib place texts elsewhere.
    texts = [re.findall(r">([^<]+)</text>", one) for one in (PICTURES[name](), shown.read_text())]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_commands_of_the_job_say_what_the_page_tells(tmp_path):
    def run(command, *more):
        assert f"\n{command}\n" in PAGE
        arguments = [sys.executable, "-m", *command.split(), *more]
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    trained = run(
        "titanlite train configs/fsdp4.toml --training.steps=20", f"--job.dump_folder={tmp_path}"
    )
    loss = re.search(r"step 20/20\s+loss (\S+)", trained)[1]
    assert f"the loss is\n{loss}." in PAGE
    verified = run("titanlite verify configs/fsdp4.toml --shrink --steps=2")
    assert re.search(r"^AGREES: max difference ", verified, flags=re.MULTILINE)
    planned = run("titanlite plan configs/fsdp4.toml --hardware=h100")
    peak = re.search(r"memory\s+(\S+ MiB) \(", planned)[1]
    assert f"{peak} of GPU memory at the peak" in PAGE
    lab = run("titanlite lab zero")
    for line in re.findall(r"^(?:data parallel|ZeRO \d).*$", lab, flags=re.MULTILINE):
        assert line.split()[-4:] in [shown.split()[-4:] for shown in PAGE.splitlines()]
    counted = run("titanlite lab collectives")
    assert re.search(r"all_reduce\s+12 / 384 B\s+24 / 192 B", counted)
