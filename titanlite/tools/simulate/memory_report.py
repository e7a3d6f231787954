"""The memory of a simulation's workers as a table, and as a picture."""

import shutil
from pathlib import Path

from titanlite.tools.simulate.memory import KINDS
from titanlite.tools.simulate.quantity import show_size, size_scale, time_scale
from titanlite.tools.simulate.result import Simulation
from titanlite.tools.tables import format_table

MOST_ROWS = 32
LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
LEAST_CURVE, MOST_CURVE = 12, 60


def show_memory(simulation: Simulation, width: int | None = None) -> str:
    """What fills each worker's memory at its peak, and how full it is over time.

    Lines have at most `width` characters (default: the terminal's) if the figures leave room.
    """
    memory, unit = simulation.memory, simulation.costs.size_unit
    workers = range(min(simulation.num_workers, MOST_ROWS))
    peaks = [memory.at_peak(worker) for worker in range(simulation.num_workers)]
    kinds = [kind for kind in KINDS if any(peak[kind] for peak in peaks)]
    rows = [
        [
            f"rank {worker}",
            *(show_size(peaks[worker][kind], unit) for kind in kinds),
            show_size(sum(peaks[worker].values()), unit),
        ]
        for worker in workers
    ]
    table = format_table(["at its peak", *kinds, "in all"], rows, left=("at its peak",))
    lines = table.splitlines()
    room = (width or shutil.get_terminal_size().columns) - max(map(len, lines)) - 2
    columns = min(MOST_CURVE, max(LEAST_CURVE, room))
    most = float(max(simulation.peak_memory))
    curves = [_over_time(simulation, worker, most, columns) for worker in workers]
    lines = [
        f"{line:{max(map(len, lines))}}  {after}".rstrip()
        for line, after in zip(lines, ["over time", "-" * columns, *curves], strict=True)
    ]
    if simulation.num_workers > MOST_ROWS:
        most = max(range(simulation.num_workers), key=simulation.peak_memory.__getitem__)
        lines.append(f"and {simulation.num_workers - MOST_ROWS} more; rank {most} holds most")
    return "\n".join(lines)


def _over_time(simulation: Simulation, worker: int, most: float, columns: int) -> str:
    """A character per equal share of the time: the most held in it, of `most`."""
    until = float(simulation.makespan)
    highest = [0.0] * columns
    corners = [(float(at), float(sum(held))) for at, held in simulation.memory.curve(worker)]
    for (start, held), (end, _) in zip(corners, [*corners[1:], (until, 0.0)], strict=True):
        first = int(start / until * columns)
        last = min(columns - 1, int(end / until * columns - 1e-9))
        for place in range(first, last + 1):
            highest[place] = max(highest[place], held)
    top = len(LEVELS) - 1
    return "".join(LEVELS[-(-int(held / most * 1000) * top // 1000)] for held in highest).rstrip()


def draw_memory(simulation: Simulation, path: Path) -> None:
    """Write the picture of the memory of all workers."""
    from titanlite.tools.figures.memory import MemoryPanel, save_memory

    costs = simulation.costs
    time_unit, time = time_scale(simulation.makespan, costs.time_unit)
    size_unit, size = size_scale(max(simulation.peak_memory), costs.size_unit)
    panels = []
    for worker in range(simulation.num_workers):
        corners = [
            (float(at) * time, [float(one) * size for one in held])
            for at, held in simulation.memory.curve(worker)
        ]
        corners.append((float(simulation.makespan) * time, corners[-1][1]))
        panels.append(MemoryPanel(f"rank {worker}", corners))
    title = simulation.full_title
    save_memory(path, panels, KINDS, title=title, time_unit=time_unit, size_unit=size_unit)
