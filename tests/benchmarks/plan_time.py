"""The predicted time of a step against the measured one, in CPU-seconds summed over all ranks.

    python tests/benchmarks/plan_time.py [--hardware FILE] [--rounds 3] [--steps 8] [job ...]

A round calibrates this machine, unless a file is given, and then measures each job. The table has
the medians over the rounds. A shared machine's speed changes from minute to minute, so each step is
measured in units of a probe that runs beside it, and multiplied by the probe's CPU-seconds in the
calibration. Wall time on shared cores is noise. Compiled blocks are run and planned as eager code.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from titanlite.config import JobConfig, parse_args, resolve_job
from titanlite.ranks.launch import spawn
from titanlite.tools.planner.calibrate import calibrate, typical_step
from titanlite.tools.planner.composition import representatives
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.hardware import Hardware, load_hardware
from titanlite.tools.planner.measure import time_steps
from titanlite.tools.planner.timing import time_events
from titanlite.tools.planner.trace import trace_rank

CONFIGS = Path(__file__).parents[2] / "configs"
# Shipped jobs of unlike plans.
JOBS = (
    *("single", "bf16", "ac", "ddp4", "fsdp4", "hsdp2x2", "tp4", "tp2_fsdp2", "tp2_async", "cp4"),
    *("pp4_1f1b", "pp2_dualpipev", "gpt2_pp2_tp2", "llama_tiny", "pp2_tp2_fsdp2"),
)


@dataclass(frozen=True)
class Row:
    """One job: CPU-seconds of a step over all ranks."""

    job: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def config_of(job: str) -> JobConfig:
    return parse_args([f"--job.config_file={CONFIGS / job}.toml", "--compile.enable=false"])


def measure(jobs: Iterable[str], steps: int) -> dict[str, float]:
    """The CPU time of a step of each job, in units of the probe."""
    by_size: dict[int, dict[str, JobConfig]] = {}
    for job in jobs:
        config = config_of(job)
        by_size.setdefault(resolve_job(config, None).dims.world_size, {})[job] = config
    found = {}
    for num_ranks, configs in by_size.items():
        of_ranks = spawn(time_steps, num_ranks, list(configs.values()), steps)
        of_jobs = zip(*(one.values for one in of_ranks), strict=True)
        for job, of_job in zip(configs, of_jobs, strict=True):
            found[job] = typical_step(of_job)
    return found


def predict(job: str, hardware: Hardware) -> float:
    """The CPU-seconds of a step: of a rank of each stage, times the ranks of a stage."""
    resolved = resolve_job(config_of(job), None)
    cost = Cost(hardware, resolved.dims)
    total = 0.0
    ranks = representatives(resolved.dims)
    for rank in ranks:
        total += time_events(trace_rank(resolved, rank).events, cost, rank).busy_seconds
        total += hardware.overhead.step_seconds
    return total * resolved.dims.world_size / len(ranks)


def compare(
    jobs: Iterable[str], rounds: int = 3, steps: int = 8, hardware: str | None = None
) -> list[Row]:
    """The medians over `rounds`, in each of which this machine is calibrated unless `hardware`."""
    jobs = list(jobs)
    of_rounds: list[list[Row]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            if hardware is None:
                calibrate(f"{folder}/cpu.toml", lambda line: None)
            known = load_hardware(hardware or f"{folder}/cpu.toml")
            unit = known.overhead.probe_seconds
            if not unit:
                sys.exit(f"--hardware: {hardware} has no probe_seconds; calibrate it again")
            measured = measure(jobs, steps)
            of_rounds.append([Row(job, unit * measured[job], predict(job, known)) for job in jobs])
    return [
        Row(
            of_job[0].job,
            statistics.median(row.measured for row in of_job),
            statistics.median(row.predicted for row in of_job),
        )
        for of_job in zip(*of_rounds, strict=True)
    ]


def errors(rows: Iterable[Row]) -> tuple[float, float]:
    """The mean and the largest of the absolute relative errors."""
    found = [abs(row.error) for row in rows]
    return statistics.fmean(found), max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hardware", help="the file of a calibration of this machine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("jobs", nargs="*", default=JOBS)
    arguments = parser.parse_args()
    rows = compare(arguments.jobs, arguments.rounds, arguments.steps, arguments.hardware)
    print("CPU-seconds of a step over all ranks")
    print(f"{'job':16} {'measured':>9} {'predicted':>9} {'error':>7}")
    for row in rows:
        print(f"{row.job:16} {row.measured:9.3f} {row.predicted:9.3f} {row.error:+7.1%}")
    mean, worst = errors(rows)
    print(f"mean error {mean:.1%}, worst {worst:.1%}")


if __name__ == "__main__":
    main()
