"""CPU-seconds of the simulator and of the schedule tables, compared with PyTorch's.

    python tests/benchmarks/simulate.py

Each line shows a measurement and its limit; the exit status is 1 if a limit is missed. PyTorch has
no function that only generates a table. The benchmark calls the methods of its schedule classes on
objects without the rest of the constructor, and the lowering passes of its runtime.
"""

import gc
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from titanlite.schedule import Schedule, add_communication, make_schedule
from titanlite.tools.simulate import (
    ComputeAndWeightWorkers,
    Costs,
    Link,
    Network,
    OldestStageFirst,
    Work,
    simulate,
)

RANKS, MICROBATCHES, CHUNKS = 128, 512, 2


def main() -> int:
    lines = [*measure_imports(), *measure_simulator(), *measure_tables()]
    missed = 0
    for what, seconds, limit in lines:
        verdict = "" if seconds <= limit else "  MISSED"
        missed += bool(verdict)
        print(f"{what:<64} {seconds:8.3f} s  at most {limit:.3f}{verdict}")
    return 1 if missed else 0


def cpu_seconds(call: Callable[[], Any], repeat: int = 1) -> tuple[float, Any]:
    """The least CPU time of `repeat` calls, and the result of the last one."""
    least, result = float("inf"), None
    for _ in range(repeat):
        # Do not free or garbage collect existing objects during the measurement.
        result = None
        gc.collect()
        gc.freeze()
        start = time.process_time()
        result = call()
        least = min(least, time.process_time() - start)
    return least, result


def measure_imports() -> list[tuple[str, float, float]]:
    code = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    lines = []
    for module in ("titanlite.tools.simulate", "titanlite.tools.simulate.command"):
        runs = [
            subprocess.run(
                [sys.executable, "-c", code.format(module)],
                capture_output=True,
                text=True,
                check=True,
                cwd=Path(__file__).parents[2],
            )
            for _ in range(3)
        ]
        lines.append((f"import {module}", min(float(run.stdout) for run in runs), 0.1))
    return lines


def measure_simulator() -> list[tuple[str, float, float]]:
    def gpipe(work: Work) -> ComputeAndWeightWorkers:
        return ComputeAndWeightWorkers(work.stage, work.stage)

    small, simulation = cpu_seconds(
        lambda: simulate(64, 64, 128, gpipe, OldestStageFirst(64, 128)), repeat=5
    )
    assert simulation.makespan == (128 + 63) * 3

    def large_with_figures() -> float:
        simulation = simulate(1024, 1024, 4096, gpipe)
        assert simulation.makespan == (4096 + 1023) * 3 == simulation.lower_bound
        assert max(simulation.peak_activations) == 3070
        return simulation.bubble_fraction

    def large_with_network() -> float:
        third, per_unit = Fraction(1, 3), Fraction(1, 7)
        network = Network(Link(Fraction(1, 10), per_unit))
        costs = Costs(third, 2 * third, activation_units=1, network=network)
        simulation = simulate(1024, 1024, 4096, gpipe, costs=costs)
        assert simulation.makespan > 4096 + 1023
        assert max(simulation.peak_activations) <= 4096
        return simulation.bubble_fraction

    large, _ = cpu_seconds(large_with_figures)
    with_network, _ = cpu_seconds(large_with_network)
    return [
        ("GPipe, 64 workers, 128 batches", small, 0.05),
        ("GPipe, 1,024 workers, 4,096 batches: bubble, bound, peaks", large, 20),
        ("the same, with costs of 1/3 and 2/3 and a network", with_network, 20),
        (
            "GPipe, 1,024 workers, 4,096 batches, by the command",
            by_command(1024, 4096, "--quiet"),
            20,
        ),
        ("PNG of GPipe, 64 workers, 128 batches, by the command", png_by_command(), 3),
    ]


def by_command(workers: int, batches: int, *options: str) -> float:
    """The CPU-seconds of `titanlite simulate GPipe` in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    size = ["--workers", str(workers), "--batches", str(batches)]
    subprocess.run(
        [sys.executable, "-m", "titanlite", "simulate", "GPipe", *size, *options],
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def png_by_command() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return by_command(64, 128, "--png", f"{folder}/gpipe.png")


def measure_tables() -> list[tuple[str, float, float]]:
    from torch.distributed.pipelining import schedules as theirs

    classes = {
        "Interleaved1F1B": theirs.ScheduleInterleaved1F1B,
        "LoopedBFS": theirs.ScheduleLoopedBFS,
        "InterleavedZeroBubble": theirs.ScheduleInterleavedZeroBubble,
        "ZBVZeroBubble": theirs.ScheduleZBVZeroBubble,
        "DualPipeV": theirs.ScheduleDualPipeV,
    }
    lines = []
    for name, schedule_class in classes.items():
        ours, schedule = cpu_seconds(
            lambda name=name: make_schedule(name, RANKS, MICROBATCHES, CHUNKS), repeat=3
        )
        bare = bare_schedule(schedule_class)
        reference, table = cpu_seconds(
            lambda bare=bare: {
                rank: bare._calculate_single_rank_operations(rank) for rank in range(RANKS)
            },
            repeat=3,
        )
        assert as_text(schedule.actions) == as_text(table.values())
        lines.append((f"{name}, compute actions (limit: PyTorch's time)", ours, reference))
        if name not in ("Interleaved1F1B", "ZBVZeroBubble"):
            continue
        lowering, lowered = cpu_seconds(lambda schedule=schedule: add_communication(schedule))
        their_lowering, expected = cpu_seconds(
            lambda table=table, schedule=schedule: lower_as_pytorch(theirs, table, schedule)
        )
        assert as_text(lowered.actions) == as_text(expected.values())
        total = reference + their_lowering
        lines.append(
            (f"{name}, all actions (limit: 1/10 of {total:.1f} s)", ours + lowering, total / 10)
        )
        del lowered, expected, table
    return lines


def bare_schedule(schedule_class: type) -> Any:
    """An object with only the attributes that the method for one rank's row reads."""
    schedule: Any = schedule_class.__new__(schedule_class)
    schedule.pp_group_size = RANKS
    schedule.num_stages = schedule._num_stages = RANKS * CHUNKS
    schedule._n_microbatches = MICROBATCHES
    schedule._stages = [Mock()] * CHUNKS
    schedule.n_local_stages = CHUNKS
    schedule.number_of_rounds = MICROBATCHES // RANKS
    schedule.microbatches_per_round = RANKS
    return schedule


def lower_as_pytorch(theirs: Any, table: dict[int, list[Any]], schedule: Schedule) -> Any:
    """The steps of `_PipelineScheduleRuntime._prepare_schedule_with_comms` after its checks."""
    rows = {
        rank: theirs._add_reduce_grad(theirs._add_unshard_reshard(row), MICROBATCHES)
        for rank, row in table.items()
    }
    return theirs._add_send_recv(rows, schedule.stage_to_rank.__getitem__, schedule.num_stages)


def as_text(rows: Any) -> list[list[str]]:
    return [[str(action) for action in row if action is not None] for row in rows]


if __name__ == "__main__":
    sys.exit(main())
