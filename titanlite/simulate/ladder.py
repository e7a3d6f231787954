"""The ladder from 0D to 4D: one workload; each rung adds a dimension and shows its gain and cost.

Each rung runs the whole training step on simulated GPUs. Its times and memory go into the table
only after a check that its results equal those of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from titanlite.simulate.cluster import Cluster
from titanlite.simulate.collectives import relay_sum, ring_all_reduce
from titanlite.simulate.gpu import ETHERNET
from titanlite.simulate.grid import Grid
from titanlite.simulate.network import Network
from titanlite.simulate.table import format_table
from titanlite.simulate.train_step import GRID_AXES, Outcome, Workload, make_train_step
from titanlite.simulate.work import SimulationError


@dataclass(frozen=True)
class Rung:
    """One rung: the `degrees` of its axes (default 1), and `below`, the rung to compare with."""

    name: str
    degrees: dict[str, int]
    below: str | None = None
    sum_gradients: Callable[..., int] = ring_all_reduce

    @property
    def grid(self) -> Grid:
        return Grid(**{axis: self.degrees.get(axis, 1) for axis in GRID_AXES})


RUNGS = [
    Rung("0D", {}),
    Rung("1D DP, relay", {"dp": 4}, "0D", relay_sum),
    Rung("1D DP, ring", {"dp": 4}, "0D"),
    Rung("2D DP x PP", {"dp": 2, "pp": 2}, "1D DP, ring"),
    Rung("2D DP x TP", {"dp": 2, "tp": 2}, "1D DP, ring"),
    Rung("3D DP x PP x TP", {"dp": 2, "pp": 2, "tp": 2}, "2D DP x PP"),
    Rung("4D with CP", {"dp": 2, "pp": 2, "cp": 2, "tp": 2}, "3D DP x PP x TP"),
    Rung("4D with EP", {"dp": 2, "pp": 2, "ep": 2, "tp": 2}, "3D DP x PP x TP"),
]


@dataclass(frozen=True)
class Measured:
    """The result of a rung. `seconds` is the time of the slowest rank; its parts are means."""

    rung: Rung
    num_ranks: int
    seconds: float
    compute_seconds: float
    communication_seconds: float
    waiting_seconds: float
    memory_units: float


def run_rung(
    rung: Rung, workload: Workload | None = None, network: Network = ETHERNET, sleep: bool = False
) -> tuple[Measured, Cluster]:
    """Run one rung. Raises SimulationError if a result differs from that of a single process."""
    workload = workload or Workload()
    grid = rung.grid
    cluster = Cluster(grid.num_ranks, network, sleep=sleep)
    outcomes = cluster.run(make_train_step(grid, workload, rung.sum_gradients))
    check_outcomes(rung, workload, outcomes)
    gpus = cluster.gpus

    def mean(*kinds: str) -> Fraction:
        return Fraction(sum(gpu.time_in(*kinds) for gpu in gpus), len(gpus))

    compute, communication = mean("compute"), mean("send", "receive")
    measured = Measured(
        rung,
        grid.num_ranks,
        cluster.seconds,
        float(compute),
        float(communication),
        float(cluster.clock - compute - communication),
        max(gpu.peak_memory_units for gpu in gpus),
    )
    return measured, cluster


def check_outcomes(rung: Rung, workload: Workload, outcomes: Sequence[Outcome]) -> None:
    """Raise SimulationError unless results and gradients equal those of a single process.

    With relay_sum, only the first rank has the summed gradient, so only that rank is checked.
    """
    grid = rung.grid
    expected = {item: item * item for item in range(workload.items)}
    results: dict[int, int] = {}
    for rank, outcome in enumerate(outcomes):
        if grid.coordinates(rank)["tp"] == 0:
            for item, part in outcome.results.items():
                results[item] = results.get(item, 0) + part
    if results != expected:
        raise SimulationError(f"{rung.name}: the results are {results}, not the items' squares")
    total = sum(expected.values())
    complete = outcomes[:1] if rung.sum_gradients is relay_sum else outcomes
    for rank, outcome in enumerate(complete):
        if outcome.gradient != total:
            raise SimulationError(
                f"{rung.name}: rank {rank} has the gradient {outcome.gradient}, not {total}"
            )
        layers = workload.layers // grid.degrees["pp"]
        for expert, gradient in outcome.expert_gradients.items():
            own = sum(v for item, v in expected.items() if item % workload.experts == expert)
            if gradient != own * layers:
                raise SimulationError(
                    f"{rung.name}: rank {rank} has the gradient {gradient} for expert {expert}, "
                    f"not {own * layers}"
                )


def run_ladder(
    workload: Workload | None = None,
    network: Network = ETHERNET,
    rungs: Sequence[Rung] = RUNGS,
    sleep: bool = False,
) -> list[Measured]:
    """Run `rungs` in order."""
    return [run_rung(rung, workload, network, sleep)[0] for rung in rungs]


HEADER = (
    "dimensions",
    "ranks",
    "seconds",
    "speed",
    "compute",
    "network",
    "waiting",
    "memory",
    "gain",
    "cost",
)


def ladder_table(measured: Sequence[Measured]) -> str:
    """A table of times and memory per rung, and the gain and cost compared with the rung below."""
    by_name = {row.rung.name: row for row in measured}
    rows = []
    for row in measured:
        below = by_name.get(row.rung.below or "")
        rows.append(
            [
                row.rung.name,
                str(row.num_ranks),
                f"{row.seconds:.1f}",
                f"{measured[0].seconds / row.seconds:.2f}x",
                f"{row.compute_seconds:.1f}",
                f"{row.communication_seconds:.1f}",
                f"{row.waiting_seconds:.1f}",
                f"{row.memory_units:.0f}",
                _bought(row, below) if below else "",
                _paid(row, below) if below else "",
            ]
        )
    return format_table(HEADER, rows, left=("dimensions", "gain", "cost"))


def _bought(row: Measured, below: Measured) -> str:
    gains = []
    if row.seconds < below.seconds:
        gains.append(f"{below.seconds - row.seconds:.1f} s")
    if row.memory_units < below.memory_units:
        gains.append(f"{1 - row.memory_units / below.memory_units:.0%} less memory")
    if row.rung.degrees.get("ep", 1) > 1:
        gains.append("4 times the feed-forward weights")
    return ", ".join(gains) or "nothing"


def _paid(row: Measured, below: Measured) -> str:
    losses = []
    if row.num_ranks > below.num_ranks:
        losses.append(f"{row.num_ranks - below.num_ranks} more ranks")
    if row.seconds > below.seconds:
        losses.append(f"{row.seconds - below.seconds:.1f} s")
    if row.communication_seconds > below.communication_seconds:
        losses.append(f"{row.communication_seconds - below.communication_seconds:.1f} s network")
    if row.waiting_seconds > below.waiting_seconds + 0.05:
        losses.append(f"{row.waiting_seconds - below.waiting_seconds:.1f} s waiting")
    if row.memory_units > below.memory_units:
        losses.append(f"{row.memory_units / below.memory_units - 1:.0%} more memory")
    return ", ".join(losses)
