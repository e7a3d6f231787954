"""The rungs of the ladder: each runs a whole training step on simulated GPUs.

A rung's times and memory go into the table only after a check that its losses, gradients and new
weights equal those of a single process.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from titanlite.mesh.parallel_dims import Grid
from titanlite.observe.terminal import terminal_width
from titanlite.tools.simulate import train_step
from titanlite.tools.simulate.collectives import relay_sum, ring_all_reduce
from titanlite.tools.simulate.gpu import ETHERNET, GPU, Cluster
from titanlite.tools.simulate.integer_model import shard
from titanlite.tools.simulate.network import Network
from titanlite.tools.simulate.work import SimulationError
from titanlite.tools.tables import format_table


@dataclass(frozen=True)
class Rung:
    """One rung: the `degrees` of its axes (default 1), and `below`, the rung to compare with.

    `overlap` and `microbatch_items` are explained at `make_train_step`.
    """

    name: str
    degrees: dict[str, int]
    below: str | None = None
    sum_gradients: train_step.SumGradients = ring_all_reduce
    overlap: bool = False
    microbatch_items: int | None = 1

    @property
    def grid(self) -> Grid:
        return Grid(**{axis: self.degrees.get(axis, 1) for axis in train_step.GRID_AXES})

    @property
    def uses_experts(self) -> bool:
        return self.degrees.get("ep", 1) > 1


RUNGS = [
    Rung("0D", {}),
    Rung("1D DP, relay", {"dp": 4}, "0D", relay_sum),
    Rung("1D DP, ring", {"dp": 4}, "0D"),
    Rung("1D DP, overlap", {"dp": 4}, "1D DP, ring", overlap=True, microbatch_items=None),
    Rung("2D DP x PP", {"dp": 2, "pp": 2}, "1D DP, ring"),
    Rung("2D DP x TP", {"dp": 2, "tp": 2}, "1D DP, ring"),
    Rung("3D DP x PP x TP", {"dp": 2, "pp": 2, "tp": 2}, "2D DP x PP"),
    Rung("4D with CP", {"dp": 2, "pp": 2, "cp": 2, "tp": 2}, "3D DP x PP x TP"),
    Rung("4D with EP", {"dp": 2, "pp": 2, "ep": 2, "tp": 2}, "3D DP x PP x TP"),
]

MAX_RANKS = 1024
MAX_MULTIPLICATIONS = 1e9  # about two minutes

CLIMB = ("dp", "pp", "tp", "cp", "ep")  # the order in which dimensions are added


def make_rungs(
    degrees: dict[str, int], *, overlap: bool = False, microbatch_items: int | None = 1
) -> list[Rung]:
    """A ladder up to `degrees`: it starts at 0D, and each rung adds one axis of CLIMB."""
    rungs = [Rung("0D", {}, microbatch_items=microbatch_items)]
    for axis in CLIMB:
        if degrees.get(axis, 1) > 1:
            here = {**rungs[-1].degrees, axis: degrees[axis]}
            name = " x ".join(f"{axis.upper()} {degree}" for axis, degree in here.items())
            rung = Rung(f"{len(here)}D {name}", here, rungs[-1].name, overlap=overlap)
            rungs.append(replace(rung, microbatch_items=microbatch_items))
    return rungs


@dataclass(frozen=True)
class Measured:
    """The result of a rung. `seconds` is the time of the slowest rank; its parts are means."""

    rung: Rung
    workload: train_step.StepWorkload
    num_ranks: int
    seconds: float
    compute_seconds: float
    communication_seconds: float
    waiting_seconds: float
    memory_units: float


def run_rung(
    rung: Rung,
    workload: train_step.StepWorkload | None = None,
    network: Network = ETHERNET,
    sleep: bool = False,
) -> tuple[Measured, Cluster]:
    """Run one rung. Raises SimulationError if a result differs from that of a single process."""
    workload = workload or train_step.StepWorkload()
    program = train_step.make_train_step(
        rung.grid,
        workload,
        rung.sum_gradients,
        overlap=rung.overlap,
        microbatch_items=rung.microbatch_items,
    )
    return run_program(program, rung, workload, network, sleep)


def run_program(
    program: Callable[[GPU], train_step.Outcome],
    rung: Rung,
    workload: train_step.StepWorkload,
    network: Network = ETHERNET,
    sleep: bool = False,
) -> tuple[Measured, Cluster]:
    """Run `program` on the ranks of `rung`, check its outcomes, and measure it."""
    check_runs(rung, workload)
    cluster = Cluster(rung.grid.world_size, network, sleep=sleep)
    check_outcomes(rung, workload, cluster.run(program))
    gpus = cluster.gpus

    def mean(*kinds: str) -> Fraction:
        return Fraction(sum(gpu.time_in(*kinds) for gpu in gpus), len(gpus))

    compute, communication = mean("compute"), mean("send", "receive", "join")
    measured = Measured(
        rung,
        workload,
        len(gpus),
        cluster.seconds,
        float(compute),
        float(communication),
        float(cluster.clock - compute - communication),
        max(gpu.peak_memory_units for gpu in gpus),
    )
    return measured, cluster


def check_runs(rung: Rung, workload: train_step.StepWorkload) -> None:
    """Raise SimulationError if `rung` cannot run with `workload`, or would take too long."""
    if rung.grid.world_size > MAX_RANKS:
        raise SimulationError(
            f"{rung.name}: {rung.grid.world_size} ranks; the ladder runs a thread for each rank, "
            f"and at most {MAX_RANKS}"
        )
    if workload.multiplications > MAX_MULTIPLICATIONS:
        raise SimulationError(
            f"the workload takes {workload.multiplications:.1e} multiplications of integers; the "
            f"ladder runs at most {MAX_MULTIPLICATIONS:.1e}; give fewer items, layers, tokens or "
            "channels (width)"
        )
    train_step.check_divides(rung.grid, workload, rung.microbatch_items)


def check_outcomes(
    rung: Rung, workload: train_step.StepWorkload, outcomes: Sequence[train_step.Outcome]
) -> None:
    """Raise SimulationError unless the outcomes of all ranks equal those of a single process.

    Every rank must have all shards that its coordinates give it, with exactly the gradients and
    weights of the single process. With relay_sum, only the first rank (and the last) has the sum of
    all gradients, so only the first is checked.
    """
    grid, whole = rung.grid, train_step.single_process(workload, rung.uses_experts)
    losses: dict[int, int] = {}
    for rank, outcome in enumerate(outcomes):
        if grid.coordinates(rank)["tp"] == 0:
            for item, part in outcome.losses.items():
                losses[item] = losses.get(item, 0) + part
    if losses != whole.losses:
        item = min(i for i in {*losses, *whole.losses} if losses.get(i) != whole.losses.get(i))
        raise SimulationError(
            f"{rung.name}: the loss of item {item} is {losses.get(item)}, "
            f"not {whole.losses.get(item)} as in a single process"
        )
    complete = outcomes[:1] if rung.sum_gradients is relay_sum else outcomes
    for rank, outcome in enumerate(complete):
        at = grid.coordinates(rank)
        own = [name for name in whole.gradients if _is_here(name, at, grid, workload)]
        for what in ("gradients", "weights"):
            found, expected = getattr(outcome, what), getattr(whole, what)
            if sorted(found) != sorted(own):
                raise SimulationError(f"{rung.name}: rank {rank} has {what} of {sorted(found)}")
            for name in own:
                if found[name] != shard(name, expected[name], at["tp"], grid.degrees["tp"]):
                    raise SimulationError(
                        f"{rung.name}: rank {rank} has {what} of {name} that differ from those "
                        "of a single process"
                    )


def _is_here(name: str, at: dict[str, int], grid: Grid, workload: train_step.StepWorkload) -> bool:
    """Whether a rank at the coordinates `at` has a shard of the weight `name`."""
    _, layer, kind, expert, *_ = name.split(".")
    is_own_layer = int(layer) * grid.degrees["pp"] // workload.layers == at["pp"]
    if kind != "experts":
        return is_own_layer
    return is_own_layer and int(expert) * grid.degrees["ep"] // workload.experts == at["ep"]


HEADER = (
    *("dimensions", "ranks", "seconds", "speed", "compute", "network", "waiting", "memory"),
    *("gain", "cost"),
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
                _number(row.seconds),
                f"{measured[0].seconds / row.seconds:.2f}x" if row.seconds else "",
                _number(row.compute_seconds),
                _number(row.communication_seconds),
                _number(row.waiting_seconds),
                f"{row.memory_units:.0f}" if row.memory_units < 1e9 else f"{row.memory_units:.3g}",
                _bought(row, below) if below else "",
                _paid(row, below) if below else "",
            ]
        )
    return format_table(HEADER, rows, (HEADER[0], *HEADER[-2:]), terminal_width(sys.stdout))


def _number(value: float) -> str:
    """A time with one decimal; a long or short one with three digits."""
    return f"{value:.1f}" if value == 0 or 0.05 <= value < 1e6 else f"{value:.3g}"


def _bought(row: Measured, below: Measured) -> str:
    gains = []
    if row.seconds < below.seconds:
        gains.append(f"{_number(below.seconds - row.seconds)} s")
    if row.memory_units < below.memory_units:
        gains.append(f"{1 - row.memory_units / below.memory_units:.0%} less memory")
    if row.rung.uses_experts and not below.rung.uses_experts:
        gains.append(f"{row.workload.experts}x feed-forward")
    return ", ".join(gains) or "nothing"


def _paid(row: Measured, below: Measured) -> str:
    losses = []
    if row.num_ranks > below.num_ranks:
        more = row.num_ranks - below.num_ranks
        losses.append(f"{more} more rank{'s' * (more > 1)}")
    if row.seconds > below.seconds:
        losses.append(f"{_number(row.seconds - below.seconds)} s")
    if row.communication_seconds > below.communication_seconds:
        losses.append(
            f"{_number(row.communication_seconds - below.communication_seconds)} s network"
        )
    if row.waiting_seconds >= below.waiting_seconds + 0.05:
        losses.append(f"{_number(row.waiting_seconds - below.waiting_seconds)} s waiting")
    if row.memory_units > below.memory_units:
        losses.append(f"{row.memory_units / below.memory_units - 1:.0%} more memory")
    return ", ".join(losses)
